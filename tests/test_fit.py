"""How far an experiment goes, which row is best and why: held against whole simulations."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from strategy_cases import resolved

import zsim
from zsim.commands.fit import limit_line
from zsim.fitting import limit, limits, peak_memory
from zsim.fitting.candidates import candidates
from zsim.reading.resolution import resolve, variant
from zsim.units import InputError
from zsim.workers import processes

SMALL = """\
question: What fits?
model: {family: gpt2, layers: 2, hidden: 4096, heads: 32, vocab: 50257, max_positions: 1024, attention: eager}
cluster: {topology: p4d.24xlarge, nodes: 1, price_per_node_hour: 32.77}
runtime: deepspeed-0.6.0
deepspeed: {bf16: {enabled: true}, zero_optimization: {stage: 2, overlap_comm: true}}
train: {micro_batch: 4, seq_len: 256, precision: bf16, activation_checkpointing: none, tokens: 1e9}
"""
MODEL = SMALL.splitlines()[1]
LARGE = "model: {preset: roberta-10b, attention: eager}"
"""Fits on one node in stage 3 alone."""


@pytest.fixture
def experiment(tmp_path):
    """Writes the small experiment with parts replaced, and loads it."""

    def make(*changes, more=""):
        text = SMALL
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path / "mine.yaml"
        path.write_text(text + more)
        return zsim.load(path)

    return make


def fits(experiment, **values):
    """By a whole simulation."""
    return zsim.simulate(changed(experiment, values)).metrics.fits


def holds(experiment, **values):
    """By the program alone."""
    return peak_memory(resolve(changed(experiment, values))).fits


def changed(experiment, values):
    names = {
        "micro_batch": "train",
        "seq_len": "train",
        "layers": "model",
        "max_positions": "model",
        "nodes": "cluster",
    }
    return variant(experiment, {f"{names[name]}.{name}": value for name, value in values.items()})


def stage(number):
    return ("stage: 2", f"stage: {number}")


class TestPeak:
    @pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
    @pytest.mark.parametrize(
        ("runtime", "sharding"),
        [
            *[(name, {"zero": {"stage": n}}) for name in ("deepspeed-0.5.4", "deepspeed-0.19") for n in range(4)],
            ("deepspeed-0.6.0", {"zero": {"stage": 2, "contiguous_gradients": False, "reduce_bucket_size": 100_000}}),
            ("ddp", {}),
            ("fsdp1", {"fsdp": {}}),
            ("fsdp1", {"fsdp": {"limit_all_gathers": False}}),
            ("fsdp2", {"fsdp": {}}),
        ],
    )
    def test_it_is_that_of_the_engine(self, tmp_path, runtime, sharding, checkpointing):
        spec = resolved(tmp_path, runtime, **sharding, gradient_accumulation=2, activation_checkpointing=checkpointing)
        engine = zsim.simulate(spec).metrics.memory
        alone = peak_memory(spec)
        assert alone.peak_allocated == engine.peak_allocated
        assert alone.categories == engine.categories
        assert alone.capacity == engine.capacity

    @pytest.mark.parametrize("checkpointing", ["none", "full"])
    @pytest.mark.parametrize(
        ("runtime", "sharding"),
        [
            *[(name, {"zero": {"stage": n}}) for name in ("deepspeed-0.5.4", "deepspeed-0.19") for n in range(4)],
            *[(name, {"fsdp": {"no_sync": wanted}}) for name in ("fsdp1", "fsdp2") for wanted in (False, True)],
        ],
    )
    def test_further_micro_batches_and_steps_hold_nothing_new(self, tmp_path, runtime, sharding, checkpointing):
        spec = resolved(tmp_path, runtime, **sharding, gradient_accumulation=7, activation_checkpointing=checkpointing)
        spec = replace(spec, noise=replace(spec.noise, steps=5))
        assert peak_memory(spec).peak_allocated == zsim.simulate(spec).metrics.memory.peak_allocated


class TestLimits:
    @pytest.mark.parametrize("number", [0, 2, 3])
    def test_micro_batch(self, experiment, number):
        asked = experiment(stage(number))
        found = limit(asked, "micro_batch")
        assert fits(asked, micro_batch=found.value)
        assert not fits(asked, micro_batch=found.value + 1)
        assert found.memory.fits
        assert not found.beyond.fits
        assert found.reason == ""

    def test_memory_in_pieces_is_no_negative_need(self, experiment):
        """What does not fit although more is free than allocated."""
        asked = experiment(stage(2))
        found = limit(asked, "micro_batch")
        pieces = replace(found.beyond, peak_allocated=found.beyond.capacity - 3 * 2**30, num_ooms=1)
        line = limit_line(replace(found, beyond=pieces), SimpleNamespace(spec=resolve(asked)))
        assert "would leave 3.00 GiB free at the peak, but no piece that is large enough for a request" in line
        nothing = limit_line(replace(found, value=None, memory=pieces), SimpleNamespace(spec=resolve(asked)))
        assert "even the least leaves 3.00 GiB free at the peak" in nothing

    def test_sequence_ends_with_the_positions(self, experiment):
        asked = experiment()
        found = limit(asked, "seq_len")
        assert found.value == 1024
        assert found.beyond is None
        assert "at most the 1024 positions of gpt2 2 x 4096" in found.reason
        longer = found.with_positions
        assert holds(asked, seq_len=longer, max_positions=longer)
        assert not fits(asked, seq_len=longer + 1, max_positions=longer + 1)

    def test_sequence_without_a_table_of_positions(self, experiment):
        shape = "{family: llama, layers: 2, hidden: 4096, heads: 32, ffn: 11008, vocab: 32000, attention: eager}"
        asked = experiment((MODEL, f"model: {shape}"))
        found = limit(asked, "seq_len")
        assert holds(asked, seq_len=found.value)
        assert not fits(asked, seq_len=found.value + 1)
        assert found.with_positions is None

    def test_a_sequence_beyond_what_the_model_was_made_for_is_said(self, experiment, tmp_path):
        shape = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}
        shape |= {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 8192}
        (tmp_path / "config.json").write_text(json.dumps(shape | {"sliding_window": 4096}))
        asked = experiment((MODEL, "model: {hf_config: config.json, attention: flash}"))
        found = limit(asked, "seq_len")
        assert found.value > 8192
        window, positions = found.warnings
        assert f"looks back 4096 of train.seq_len {found.value} tokens" in window
        assert f"train.seq_len {found.value} is beyond the 8192 positions" in positions
        assert limit(asked, "micro_batch").warnings == ()
        assert limit(experiment(), "seq_len").warnings == ()
        line = limit_line(found, SimpleNamespace(spec=resolve(asked)))
        assert line.endswith(f"; but {window}; but {positions}")

    def test_layers_at_the_same_width(self, experiment):
        asked = experiment(("micro_batch: 4", "micro_batch: 64"))
        found = limit(asked, "layers")
        assert holds(asked, layers=found.value)
        assert not fits(asked, layers=found.value + 1)
        model = zsim.simulate(variant(asked, {"model.layers": found.value})).metrics.work
        assert found.num_parameters == model.num_parameters

    def test_nodes(self, experiment):
        asked = experiment((MODEL, LARGE), stage(2))
        found = limit(asked, "nodes")
        assert found.value > 1
        assert holds(asked, nodes=found.value)
        assert not fits(asked, nodes=found.value - 1)
        assert limit(experiment(), "nodes").value == 1

    def test_what_no_number_of_nodes_holds(self, experiment):
        asked = experiment((MODEL, LARGE), stage(0))
        found = limit(asked, "nodes")
        assert found.value is None
        assert not found.memory.fits
        assert limit(asked, "micro_batch").value is None

    def test_a_search_goes_down_too(self, experiment):
        asked = experiment(("micro_batch: 4", "micro_batch: 4096"))
        assert limit(asked, "micro_batch").value == limit(experiment(), "micro_batch").value

    def test_numbers_of_nodes_that_are_refused_are_passed_over(self, experiment):
        """A secondary partition of two nodes has to divide the ranks."""
        partition = "stage: 3, zero_hpz_partition_size: 16"
        changes = (
            (MODEL, LARGE),
            ("deepspeed-0.6.0", "deepspeed-0.19"),
            ("stage: 2", partition),
            ("nodes: 1", "nodes: 6"),
        )
        asked = experiment(*changes, ("checkpointing: none", "checkpointing: full"))
        found = limit(asked, "nodes")
        accepted = []
        for nodes in range(1, 7):
            try:
                accepted += [nodes] if holds(asked, nodes=nodes) else []
            except InputError:
                assert nodes % 2
        assert found.value == min(accepted)
        assert set(accepted) < set(range(1, 7))

    def test_what_is_not_tried_is_said(self, experiment, monkeypatch):
        monkeypatch.setattr(limits, "_MOST_LAYERS", 50)
        shape = "{family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 100, max_positions: 256}"
        found = limit(experiment((MODEL, f"model: {shape}"), stage(3)), "layers")
        assert (found.value, found.beyond) == (50, None)
        assert found.reason == "more than 50 were not tried"

    def test_a_total_batch_follows_the_micro_batch(self, experiment):
        free, bound = experiment(), experiment(("bf16: {", "train_batch_size: 32, bf16: {"))
        assert limit(bound, "micro_batch") == limit(free, "micro_batch")


class TestCandidates:
    def test_all_fit_and_the_largest_is_the_limit(self, experiment):
        asked = experiment()
        with processes(2) as pool:
            found = candidates(asked, pool)
        assert {(row["deepspeed.zero_optimization.stage"], row["train.activation_checkpointing"]) for row in found} == {
            (number, kind) for number in (1, 2, 3) for kind in ("none", "selective", "full")
        }
        largest = max(row["train.micro_batch"] for row in found if is_as_written(row))
        assert largest == limit(asked, "micro_batch").value
        assert all(peak_memory(resolve(variant(asked, row))).fits for row in found)

    def test_a_total_batch_stays(self, experiment):
        asked = experiment(("bf16: {", "train_batch_size: 96, bf16: {"), ("micro_batch: 4, ", ""))
        with processes(2) as pool:
            found = candidates(asked, pool)
        assert {row["train.micro_batch"] for row in found} == {12, 6, 4}
        assert all(row["train.micro_batch"] * row["train.gradient_accumulation"] * 8 == 96 for row in found)

    def test_without_deepspeed_there_are_no_stages(self, experiment):
        asked = experiment(
            ("deepspeed-0.6.0", "ddp"), ("stage: 2", "stage: 0"), ("attention: eager", "attention: sdpa")
        )
        with processes(2) as pool:
            found = candidates(asked, pool)
        assert {next(iter(row)) for row in found} == {"train.activation_checkpointing"}
        assert {row["train.activation_checkpointing"] for row in found} == {"none", "full"}


def is_as_written(row):
    return row["deepspeed.zero_optimization.stage"] == 2 and row["train.activation_checkpointing"] == "none"


class TestFit:
    def test_the_sweep_of_the_file(self, experiment):
        asked = experiment(more="sweep: {cluster.nodes: [1, 2], train.micro_batch: [2, 4, 8]}\n")
        found = zsim.fit(asked)
        assert len(found.rows.rows) == 6
        assert [choice.aim for choice in found.choices] == ["fastest", "cheapest"]
        assert found.choices[0].row == found.rows.fastest
        assert found.choices[1].row == found.rows.cheapest
        assert [one.quantity for one in found.limits] == ["micro_batch", "seq_len", "layers", "nodes"]
        assert found.memory == peak_memory(found.spec)

    def test_the_reason_is_that_of_two_simulations(self, experiment):
        asked = experiment(more="sweep: {deepspeed.zero_optimization.stage: [1, 3]}\n")
        (fastest, _) = zsim.fit(asked).choices
        best, next_ = (zsim.simulate(variant(asked, row.assignments)) for row in (fastest.row, fastest.runner_up))
        assert fastest.longer_s == pytest.approx(next_.step_time_s - best.step_time_s)
        for cause, seconds in fastest.causes_s.items():
            other = next_.metrics.breakdown_s[cause]
            assert seconds == pytest.approx(other - best.metrics.breakdown_s[cause], abs=1e-12)

    def test_a_stored_sweep(self, zsim_main, experiment, tmp_path):
        asked = experiment(more="sweep: {train.micro_batch: [2, 4]}\n")
        stored = zsim.sweep(asked, axes={"train.micro_batch": [2, 8]}, store=tmp_path / "x.sqlite", workers=1)
        assert zsim.fit(asked, rows=tmp_path / "x.sqlite").rows == stored
        changed = zsim.load(asked.path, ["train.seq_len=128"])
        with pytest.raises(InputError, match=r"was begun with train\.seq_len 256, now 128"):
            zsim.fit(changed, rows=tmp_path / "x.sqlite")
        code, out, _ = zsim_main("fit", asked.path, "--sweep", tmp_path / "x.sqlite")
        assert code == 0
        assert "Of 2 rows 2 fit." in out

    def test_one_screen(self, zsim_main, experiment):
        code, out, err = zsim_main("fit", experiment().path)
        assert (code, err) == (0, "")
        for words in (
            "largest micro-batch: ",
            "largest sequence length: 1,024",
            "fewest nodes: 1",
            "fastest and cheapest: ",
        ):
            assert words in out

    def test_nothing_fits(self, zsim_main, experiment):
        large = (MODEL, LARGE)
        asked = experiment(large, stage(0), ("deepspeed-0.6.0", "ddp"))
        code, out, _ = zsim_main("fit", asked.path)
        assert code == 0
        assert "no micro-batch" in out
        assert "as written it does NOT fit" in out
        assert "none of 0 rows fits" in out

    def test_a_total_batch_is_said_of_the_row_that_has_it(self, zsim_main, experiment):
        machines = [("p5.48xlarge", 1, 1e4), ("p4d.24xlarge", 2, 1e-2)]
        sections = ", ".join(f"{{topology: {name}, nodes: {n}, price_per_node_hour: {p}}}" for name, n, p in machines)
        path = experiment(("deepspeed-0.6.0", "deepspeed-0.19"), more=f"sweep: {{cluster: [{sections}]}}\n").path
        said = "its total batch is 64 sequences instead of 32"
        fastest, cheapest = " ".join(zsim_main("fit", path)[1].split()).split(" cheapest: ")
        assert " fastest: topology p5.48xlarge" in fastest
        assert "total batch" not in fastest
        assert f"{said}; a train_batch_size of 32 in deepspeed keeps it" in cheapest
        ddp = ("--set", "runtime=ddp", "--set", "deepspeed.zero_optimization.stage=0")
        assert f"  {said}\n" in zsim_main("fit", path, *ddp)[1]

    def test_json_on_stdout_is_one_document(self, zsim_main, experiment):
        asked = experiment(more="sweep: {train.micro_batch: [2, 4]}\n")
        code, out, err = zsim_main("fit", asked.path, "--json", "-")
        assert (code, err) == (0, "")
        document = json.loads(out)
        assert document["schema"] == "zsim-fit/1"
        assert document["limits"][0]["value"] == limit(asked, "micro_batch").value
        assert sum(document["choices"][0]["causes_s"].values()) == pytest.approx(document["choices"][0]["longer_s"])

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--write", "/nowhere/x.json"], "cannot write into /nowhere"),
            (["--write", "{file}"], "would overwrite the input"),
            (["--sweep", "{folder}/none.sqlite"], "does not exist"),
            (["--sweep", "{file}"], "is no file of zsim sweep"),
            (["--set", "train.micro_batch=0"], "micro_batch"),
            (["--set", "runtime=ddp", "--set", "deepspeed.zero_optimization.stage=0", "--write", "{folder}/x.json"],
             "ddp reads no DeepSpeed configuration"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_one_line_and_leaves_nothing(self, zsim_main, experiment, tmp_path, options, said):
        path = experiment().path
        filled = [option.format(folder=tmp_path, file=path) for option in options]
        code, out, err = zsim_main("fit", path, *filled)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert said in err
        assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]

    def test_what_cannot_be_written_is_refused_before_the_work(self, zsim_main, experiment, tmp_path, monkeypatch):
        path = experiment(more="sweep: {runtime: [ddp, fsdp2]}\n").path
        monkeypatch.setattr(zsim, "fit", lambda *_, **__: pytest.fail("it began"), raising=False)
        code, _, err = zsim_main("fit", path, "--write", tmp_path / "x.json")
        assert code == 2
        assert "ddp and fsdp2 read no DeepSpeed configuration" in err

    def test_no_heavy_library_is_loaded_for_nothing(self):
        """In a process of its own: other tests load DeepSpeed."""
        code = "import sys, zsim.fitting; print({'deepspeed', 'torch', 'matplotlib'} & set(sys.modules))"
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
        )
