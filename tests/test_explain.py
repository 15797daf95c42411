"""Why one run is faster than another: the rows add up, and each says what it must."""

import json
import math

import pytest
from traces import one_step, span, trace

import zsim
from zsim import cli
from zsim.figures.causes import ORDER, Cause, cause_of, shares
from zsim.figures.differences import acting_on, differences
from zsim.pipeline import load, resolve, simulate

BEFORE, AFTER = "experiments/roberta_10b_p4d_before.yaml", "experiments/roberta_10b_p4d_after.yaml"
FEW = ["model.layers=3"]


def spec(file, *sets):
    return resolve(load(file, [*FEW, *sets]))


@pytest.fixture(scope="module")
def article():
    """The article's before and after, all layers."""
    return zsim.explain(BEFORE, AFTER)


def by_name(explanation):
    return {row.name: row for row in explanation.rows}


def adds_up(explanation):
    assert math.fsum(row.before_s for row in explanation.rows) == pytest.approx(explanation.before_s, abs=1e-9)
    assert math.fsum(row.after_s for row in explanation.rows) == pytest.approx(explanation.after_s, abs=1e-9)
    assert math.fsum(row.difference_s for row in explanation.rows) == pytest.approx(explanation.difference_s, abs=1e-9)
    assert all(row.before_s >= 0 and row.after_s >= 0 for row in explanation.rows)
    changes = [abs(row.difference_s) for row in explanation.rows]
    assert changes == sorted(changes, reverse=True)


def test_the_article_adds_up_and_is_about_exposed_collectives(article):
    adds_up(article)
    assert article.before_s == pytest.approx(simulate(BEFORE).step_time_s, rel=1e-12)
    assert article.after_s == pytest.approx(simulate(AFTER).step_time_s, rel=1e-12)
    assert article.speedup > 1.5
    assert f"{article.speedup:.2f} x faster" in article.headline
    assert "of it: exposed all-gathers" in article.headline
    assert article.basis == "step"
    assert article.notes == ()


def test_rows_say_what_is_behind_them(article):
    rows = by_name(article)
    reduction = rows["exposed reductions, backward"]
    assert reduction.facts.startswith("810 -> 22 calls, 1 Ψ, ")
    assert "reduce_sync host -> stream" in reduction.reasons
    gather = rows["exposed all-gathers, recompute"]
    assert gather.facts.startswith("300 -> 10 calls, ")
    assert "6,815 -> 461 syncs" in rows["syncs with an idle device"].why
    assert rows["host: debug strings"].reasons == "debug_norms true -> false"
    # The same GEMMs on the same GPUs; beside more communication they take longer, which is a row of its own.
    for phase in ("forward", "recompute", "backward"):
        assert rows[f"GEMMs, {phase}"].difference_s == 0
        assert " -> " not in rows[f"GEMMs, {phase}"].why
    assert rows["slowed by collectives and copies"].difference_s > 0


PAIRS = {
    "stages": ((BEFORE,), (BEFORE, "deepspeed.zero_optimization.stage=2")),
    "machines": ((AFTER,), (AFTER, "cluster.topology=dgx-a100-80gb")),
    "nodes": ((AFTER, "cluster.nodes=2"), (AFTER, "cluster.nodes=16")),
    "one switch": ((BEFORE,), (BEFORE, "optimisations.debug_norms=false")),
    "steps": ((AFTER, "noise.steps=2"), (AFTER,)),
    "framework": ((AFTER, "deepspeed.zero_optimization.stage=0", "runtime=ddp"), (AFTER,)),
    "micro-batches": ((AFTER,), (AFTER, "train.micro_batch=4")),
    "one GPU": ((AFTER, "cluster.nodes=1", "cluster.gpus_per_node=1"), (AFTER, "cluster.nodes=1")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_add_up(pair):
    (one, *one_sets), (other, *other_sets) = PAIRS[pair]
    explanation = zsim.explain(spec(one, *one_sets), spec(other, *other_sets))
    adds_up(explanation)
    assert explanation.difference_s != 0 or pair == "steps"
    back = zsim.explain(spec(other, *other_sets), spec(one, *one_sets))
    adds_up(back)
    if explanation.basis == "step":
        assert back.difference_s == pytest.approx(-explanation.difference_s, abs=1e-12)


def test_a_run_explains_itself_with_zeros():
    result = simulate(spec(BEFORE))
    explanation = zsim.explain(result, result)
    assert {row.difference_s for row in explanation.rows} == {0.0}
    assert explanation.differences == ()
    assert explanation.speedup == 1
    assert "no difference" in explanation.headline
    adds_up(explanation)


def test_other_batches_are_compared_for_the_same_tokens():
    small = spec(AFTER, "train.micro_batch=4")
    explanation = zsim.explain(spec(AFTER), small)
    assert explanation.basis == "tokens"
    assert explanation.tokens == 16 * 512
    assert explanation.after_s == pytest.approx(4 * simulate(small).step_time_s)
    assert any("compared for the same 8,192 tokens a GPU" in note for note in explanation.notes)


def test_other_models_and_clusters_are_said():
    notes = zsim.explain(spec(AFTER), resolve(load(AFTER, ["model.layers=2", "cluster.nodes=2"]))).notes
    assert any(note.startswith("different models: ") for note in notes)
    assert any(note.startswith("64 and 16 GPUs") for note in notes)


def test_differences_are_inputs_and_nothing_else():
    given = differences(spec(BEFORE), spec(BEFORE, "optimisations.debug_norms=false", "cluster.nodes=4"))
    assert [(d.path, d.before, d.after) for d in given] == [
        ("cluster.num_nodes", 8, 4),
        ("runtime.optimisations.debug_norms", True, False),
    ]
    assert [d.path for d in acting_on("host", "debug strings", given)] == ["runtime.optimisations.debug_norms"]
    assert [d.path for d in acting_on("exposed_all_gather", "", given)] == ["cluster.num_nodes"]
    assert differences(spec(BEFORE), spec(BEFORE)) == ()


def test_every_cause_can_be_explained():
    (difference,) = differences(spec(AFTER), spec(AFTER, "deepspeed.zero_optimization.stage=2"))[:1]
    works = {"compute": ("GEMMs", "memory-bound kernels", "slowed by collectives and copies")}
    for cause in ORDER:
        for work in works.get(cause.name, (cause.part if cause.name == "host" else "",)):
            assert isinstance(acting_on(cause.name, work, (difference,)), tuple)


def test_causes_own_known_parts_of_a_step():
    """The step of `traces.one_step`: the host's last five seconds and the waits within its 40 seconds of Python."""
    found = {cause: share.seconds for cause, share in shares(trace()).items() if share.seconds}
    assert found == {
        Cause("compute", "forward"): 20,
        Cause("compute", "backward"): 10,
        Cause("optimizer", "step"): 5,
        Cause("exposed_all_gather", "forward"): 15,
        Cause("exposed_reduce", "backward"): 10,
        Cause("exposed_other_communication", "step"): 10,
        Cause("copies", ""): 5,
        Cause("sync", ""): 10,
        Cause("host", "launches"): 10,
        Cause("host", "other Python"): 5,
    }


def test_copies_for_a_collective_are_no_calls_of_it():
    share = shares(trace())[Cause("exposed_all_gather", "forward")]
    assert (share.count, share.nbytes, share.running_s) == (1, 1000, 25)
    assert share.hidden == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("note", "part"),
    [
        ("visit", "hooks and module calls"),
        ("decision", "fetch and release decisions"),
        ("string", "debug strings"),
        ("narrow", "lists and views of tensors"),
        ("record", "events and streams"),
        ("alloc", "allocator"),
        ("item", "optimizer and gradients"),
        ("something new", "other Python"),
    ],
)
def test_the_host_is_told_apart_by_what_it_does(note, part):
    assert cause_of(span("host", "host", 0, 1, note=note)) == Cause("host", part)
    assert len(one_step()) == 12


def test_the_command_prints_rows_that_add_up(capsys):
    arguments = ["explain", BEFORE, BEFORE, "--set", FEW[0], "--set-b", "optimisations.debug_norms=false"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "zsim-explain/1"
    total_s = math.fsum(row["difference_s"] for row in document["rows"])
    assert total_s == pytest.approx(document["after_s"] - document["before_s"], abs=1e-9)
    assert [d["path"] for d in document["differences"]] == ["runtime.optimisations.debug_norms"]
    assert (document["before"], document["after"]) == ("roberta_10b_p4d_before (A)", "roberta_10b_p4d_before (B)")
    assert cli.main(arguments) == 0
    screen = capsys.readouterr().out
    assert document["headline"].split(":")[0] in " ".join(screen.split())
    assert "together" in screen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([BEFORE], "Missing argument 'B'"),
        ([BEFORE, "nowhere.yaml"], "'nowhere.yaml' does not exist"),
        ([BEFORE, AFTER, "--set-b", "cluster.node=2"], "did you mean 'nodes'"),
        ([BEFORE, AFTER, "--json", "/nowhere/x.json"], "cannot write into /nowhere"),
        ([BEFORE, AFTER, "--json", AFTER], "would overwrite the input"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert cli.main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
