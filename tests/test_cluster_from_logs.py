"""From a log of nccl-tests and a profile to the prediction of another run: docs/my_cluster_from_logs.md."""

import pytest
from measured_example import FOLDER, HIDDEN, LOG, TRACE, true_step_time_s

from zsim import units
from zsim.cli import main
from zsim.comparing import compare, read
from zsim.pipeline import load, resolve, simulate

MOST_ERROR = 0.04
"""Of it 3.1 % are the slowest of 32 chips, which neither log nor profile tells."""


def found(spec, path):
    return next(constant for constant in spec.constants if constant.path == path)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """The last experiment with files that the commands write now."""
    folder = tmp_path_factory.mktemp("cluster")
    topology, software = folder / "my_cluster.yaml", folder / "software.yaml"
    start = ["calibrate", "network", str(LOG), "--topology", "docs/my_cluster.yaml"]
    assert main([*start, "--output", str(topology)]) == 0
    assert main(["calibrate", "trace", str(TRACE), str(FOLDER / "profiled.yaml"), "--output", str(software)]) == 0
    return resolve(load(FOLDER / "llama_7b.yaml", [f"cluster.topology={topology}", f"constants={software}"]))


@pytest.mark.parametrize("path", [path for path in HIDDEN if not path.endswith("chip_spread")])
def test_what_the_machine_reaches_is_found(path, predicted):
    wanted = units.parse(HIDDEN[path], units.dimension_of(path), "")
    constant = found(predicted, path)
    assert constant.origin == "measured"
    assert constant.value == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("path", HIDDEN)
def test_the_files_that_ship_are_those_that_the_commands_write(path, predicted):
    shipped = resolve(load(FOLDER / "llama_7b.yaml"))
    assert found(shipped, path).value == found(predicted, path).value


def test_the_run_that_was_asked_for(predicted):
    true_s = true_step_time_s()
    error = simulate(predicted).step_time_s / true_s - 1
    assumed = ["cluster.topology=../../docs/my_cluster.yaml", "constants=[]"]
    error_before = simulate(resolve(load(FOLDER / "llama_7b.yaml", assumed))).step_time_s / true_s - 1
    assert abs(error) < MOST_ERROR < abs(error_before)
    page = (FOLDER.parents[1] / "docs" / "my_cluster_from_logs.md").read_text(encoding="utf-8")
    assert f"takes {true_s:.2f} s" in page


def compared(*sets):
    spec = resolve(load(FOLDER / "profiled.yaml", sets))
    return compare(spec, read(TRACE, spec))


def test_the_profile_against_its_own_prediction():
    comparison = compared(f"constants={FOLDER / 'software.yaml'}")
    assert comparison.measured.count == "payload"
    for name in ("step", "forward", "backward", "optimizer", "exposed_comm"):
        assert abs(comparison.error_pct(name)) < 100 * MOST_ERROR, name
    assert comparison.error_pct("bytes") == pytest.approx(0, abs=0.1)
    causes = {row.event.what for row in comparison.events}
    assert {"compute", "optimizer", "exposed_all_gather", "exposed_reduce"} <= causes
    difference_s = sum(row.difference_s for row in comparison.events)
    assert difference_s == pytest.approx(comparison.predicted["step"] - comparison.measured.step_time_s, abs=1e-3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cluster.nodes=2", "is a run of ranks 32, the experiment has 16; allowed: a run of the same"),
        (
            "train.gradient_accumulation=4",
            "is a run of micro-batches 1, the experiment has 4; allowed: a run of the same",
        ),
    ],
)
def test_a_profile_of_another_run(word, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        compared(word)
    assert message in str(error.value)
