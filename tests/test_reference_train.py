"""A measured run from its options to its result: schedule, numbers, skipped steps, what the user may get wrong."""

import gzip
import json
from statistics import median

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
from reference_cases import lab_experiment
from traces import WORK

import zsim
from reference import engines
from reference.device.recorder import Recorder
from reference.train import train
from reference.training import measurement, world
from reference.training.options import Options, parse
from reference.training.steps import Log, Schedule, Training
from zsim.units import InputError

SIZE = 2


def trained(path, options):
    train(zsim.resolve(path), options)


def a_run(ranks, folder, stage=3, **options):
    path = lab_experiment(folder, stage=stage)
    options = Options(experiment=path, output=folder / "out", timeout_s=30.0, **{"steps": 5, "warmup": 1} | options)
    ranks(SIZE, trained, path, options, timeout_s=120)
    return path, json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("stage", [0, 3])
def test_result_of_a_run(ranks, tmp_path, stage):
    path, result = a_run(ranks, tmp_path, stage, trace=tmp_path / "all.json", profile=tmp_path / "profiles")
    predicted = zsim.simulate(path).metrics.to_json()
    assert set(predicted) <= set(result)
    assert result["provenance"]["origin"] == "measured"
    # One of warm-up, then five: two timed, three recorded.
    assert result["steps"] == {"first": 0, "first_measured": 1, "first_recorded": 3, "end": 6}
    assert len(result["step_times_s"]) == 5
    assert len(result["losses"]) == 6
    assert result["losses"][-1] < result["losses"][0]
    assert result["step_time_s"] == median(result["step_times_s"][:2])
    assert result["noise"]["interquartile_s"] == pytest.approx(
        abs(result["step_times_s"][0] - result["step_times_s"][1]) / 2
    )
    assert result["work"] == predicted["work"]
    assert result["recording"]["num_events"] > 100
    assert 0 < result["recording"]["event_s"] < 1e-3
    for rank in range(SIZE):
        with gzip.open(tmp_path / "out" / f"trace.rank_{rank}.json.gz") as file:
            assert {event["pid"] for event in json.load(file)["traceEvents"]} == {rank}
        with gzip.open(tmp_path / "profiles" / f"profile.rank_{rank}.json.gz") as file:
            assert json.load(file)["traceEvents"]
    every = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert {event["pid"] for event in every["traceEvents"]} >= set(range(SIZE))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_recorded_collectives_are_the_bytes_that_were_sent_and_predicted(ranks, tmp_path, stage):
    path, result = a_run(ranks, tmp_path, stage)
    # `bytes_per_gpu` counts 2 S of an all-reduce and S of the others; a ring sends (N - 1)/N of that.
    recorded = sum(row["bytes_per_gpu"] for row in result["collectives"])
    assert result["payload_bytes"]["step"] == pytest.approx([recorded * (SIZE - 1) / SIZE] * SIZE, rel=0.001)
    predicted = sum(row.bytes_per_gpu for row in zsim.simulate(path).metrics.collectives)
    assert recorded == pytest.approx(predicted, rel=0.001)
    if stage < 3:
        assert recorded == pytest.approx(2 * 4 * result["parameters"]["total"], rel=0.001)


def test_memory_by_the_tensors_own_count(ranks, tmp_path):
    psi = zsim.simulate(lab_experiment(tmp_path, stage=3)).metrics.work.num_parameters
    held = {}
    for stage in (0, 3):
        (tmp_path / str(stage)).mkdir()
        _, result = a_run(ranks, tmp_path / str(stage), stage)
        held[stage] = result["peak_memory_bytes"][0]
        assert result["memory_bytes"] == held[stage]
        assert min(result["process_peak_bytes"]) > held[stage]["peak_allocated"]
    assert held[0]["parameters"] == 4 * psi
    assert held[0]["optimizer"] == 8 * psi
    assert held[0]["gradients"] == 4 * psi
    assert held[3]["optimizer"] == pytest.approx(4 * psi, rel=0.01)


# ---------------------------------------------------------------------- skipped steps


def poisoned(path, factor):
    """Rank 1's loss becomes no number in step 2: parameters around each step, and what is said of it."""
    spec = zsim.resolve(path)
    recorder = Recorder(dist.get_rank())
    engine = engines.create("reference", spec, seed=0, recorder=recorder, timeout_s=20)
    sharded, backward = engine.sharded, engine.sharded.backward
    training = Training(spec, Options(experiment=path, warmup=0, steps=5), engine, recorder)
    around, said = [], []

    class Watched:
        payload_bytes = staticmethod(engine.payload_bytes)

        def step(self, batches):
            is_poisoned = len(around) == 2 and recorder.rank == 1
            sharded.backward = (lambda loss: backward(loss * factor)) if is_poisoned else backward
            before = {name: tensor.clone() for name, tensor in sharded.whole_parameters().items()}
            outcome = engine.step(batches)
            after = sharded.whole_parameters()
            around.append(all(bool((before[name] == after[name]).all()) for name in before))
            said.append(training.said)
            return outcome

    training.engine = Watched()
    log = training.run(training.prepare())
    engine.close()
    return log.skipped_steps, around, log.losses, [*said[1:], training.said]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_nan_on_one_rank_skips_the_step_on_all(ranks, tmp_path, stage, factor):
    results = ranks(SIZE, poisoned, lab_experiment(tmp_path, stage=stage), factor, timeout_s=120)
    for skipped, unchanged, losses, said in results:
        assert skipped == [2]
        assert unchanged == [False, False, True, False, False]
        assert losses[-1] < losses[0]
        assert ["skipped" in message for message in said] == [False, False, True, True, True]
        assert "1 skipped, the last was step 3" in said[-1]


# ---------------------------------------------------------------------- options


def test_all_steps_of_an_engine_that_records_nothing_are_timed():
    spec = zsim.resolve(zsim.load("experiments/lab_zero3.yaml"))
    logs = [Log(rank, losses=[1.0] * 5, step_times_s=[9.0, 1.0, 2.0, 3.0, 6.0 + rank]) for rank in range(2)]
    schedule = Schedule(0, 1, 2, 5)
    document = measurement.result(measurement.trace_of(spec, schedule, logs), schedule, logs, WORK)
    assert (document["step_time_s"], document["step_time_interval_s"]) == (2.5, [1.0, 7.0])
    assert document["noise"] == {"num_steps": 4, "interquartile_s": 2.25, "share": 0.9}


def test_schedules():
    options = Options(experiment=None, warmup=2, steps=10)
    assert Schedule.of(options) == Schedule(0, 2, 9, 12)
    # A process that resumes warms up again, as far as steps are left.
    assert Schedule.of(options, 5) == Schedule(5, 7, 9, 12)
    assert Schedule.of(options, 11) == Schedule(11, 11, 11, 12)
    assert Schedule.of(Options(experiment=None, warmup=0, steps=1)) == Schedule(0, 0, 0, 1)
    assert Schedule.of(Options(experiment=None, warmup=0, steps=2)) == Schedule(0, 0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["e.yaml", "--steps", "0"], "argument --steps: given 0; allowed: 1 or more"),
        (["e.yaml", "--steps", "many"], "argument --steps: invalid number value: 'many'"),
        (["e.yaml", "--step", "3", "--x"], "unrecognized arguments: --x"),
        ([], "the following arguments are required: EXPERIMENT"),
        (["e.yaml", "--resume"], "--resume: no folder to resume from is given; allowed: with --checkpoint DIR"),
        (
            ["e.yaml", "--checkpoint", "c", "--engine", "ddp"],
            "--checkpoint: given with --engine ddp; allowed: with --engine reference",
        ),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(InputError) as error:
        parse(arguments)
    assert str(error.value).endswith(message)


def trained_as_started(path):
    with world.joined(zsim.resolve(path), timeout_s=5):
        pass


def test_another_number_of_ranks_than_the_experiment_has(tmp_path, monkeypatch):
    path = lab_experiment(tmp_path, stage=3, nodes=3)
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(InputError, match="not started as a rank; allowed: torchrun"):
        trained_as_started(path)
    for variable in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="its cluster has 3 ranks, 2 were started"):
        trained_as_started(path)
