"""`constants` of an experiment: what replaces numbers of topology and runtime, and what is refused."""

import pytest

from zsim.pipeline import simulate
from zsim.reading.resolution import load, resolve

EXPERIMENT = """\
question: How fast?
model: {preset: gpt2-124m, layers: 2}
cluster: {topology: p4d.24xlarge, nodes: 1}
runtime: ddp
train: {micro_batch: 4, seq_len: 512, precision: bf16}
"""
GEMMS = 'runtime: {stack: {gemm_efficiency: {value: 0.5, origin: measured, source: "a profile", range: [0.4, 0.6]}}}'

TOO_FAST = """\
constants:
  cluster:
    network: {intra_bus_bytes_per_s: {value: 900 GB/s, origin: measured, source: x}}
"""


@pytest.fixture
def spec(tmp_path):
    """Resolves the experiment with more lines, beside files of these contents."""

    def make(lines="", overrides=(), **files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        (tmp_path / "mine.yaml").write_text(EXPERIMENT + lines)
        return resolve(load(tmp_path / "mine.yaml", overrides))

    return make


def constant(spec, path):
    return next(constant for constant in spec.constants if constant.path == path)


@pytest.mark.parametrize(
    "lines",
    ["constants: own.yaml\n", "constants: [own.yaml]\n", f"constants: {{{GEMMS}}}\n"],
    ids=["path", "list", "inline"],
)
def test_a_number_replaces_that_of_the_software(spec, lines):
    own = spec(lines, own=GEMMS)
    found = constant(own, "runtime.stack.gemm_efficiency")
    assert own.runtime.stack.gemm_efficiency == found.value == 0.5
    assert (found.origin, found.source, found.low, found.high) == ("measured", "a profile", 0.4, 0.6)
    others = [c for c in own.constants if c.path != found.path]
    assert others == [c for c in spec().constants if c.path != found.path]
    assert simulate(own).step_time_s > 1.1 * simulate(spec()).step_time_s


def test_units_whole_numbers_and_generations(spec):
    own = spec(
        "constants: [one.yaml, two.yaml]\n",
        one="cluster: {device: {num_sms: {value: 54, origin: measured, source: half}}}",
        two="runtime: {host: {op_forward_s: {by_generation: {ampere: {value: 3 us, origin: measured, source: x}}}}}",
    )
    assert own.cluster.device.num_sms == 54
    assert isinstance(own.cluster.device.num_sms, int)
    assert own.runtime.host.op_forward_s == 3e-6


def test_a_file_named_on_the_command_line(spec, tmp_path):
    (tmp_path / "typed.yaml").write_text(GEMMS)
    assert spec(overrides=[f"constants={tmp_path / 'typed.yaml'}"]).runtime.stack.gemm_efficiency == 0.5
    (tmp_path / "mine.yaml").write_text(EXPERIMENT + "constants: typed.yaml\n")
    assert tmp_path / "typed.yaml" in load(tmp_path / "mine.yaml").files


@pytest.mark.parametrize(
    ("lines", "own", "message"),
    [
        (
            "constants: own.yaml\n",
            GEMMS.replace("gemm_eff", "gem_eff"),
            "did you mean 'runtime.stack.gemm_efficiency'?",
        ),
        (
            "constants: own.yaml\n",
            GEMMS.replace("0.5", "1.5"),
            "own.yaml:1: runtime.stack.gemm_efficiency.value: 1.5 is",
        ),
        ("constants: own.yaml\n", GEMMS.replace("0.5", "0.7"), "does not enclose the value 0.7"),
        (
            "constants: own.yaml\n",
            "runtime: {stack: {gemm_efficiency: 0.5}}",
            "given 0.5; allowed: a number with value",
        ),
        ("constants: own.yaml\n", "runtime: 3", "own.yaml:1: runtime: given 3"),
        ("constants: [own.yaml, own.yaml]\n", GEMMS, "gemm_efficiency: given twice, also at "),
        ("constants: none.yaml\n", "", "mine.yaml:6: constants: "),
        (
            "constants: 3\n",
            "",
            "mine.yaml:6: constants: given 3; allowed: the path of a file, a list of paths, or a mapping",
        ),
        ("constants: [3]\n", "", "mine.yaml:6: constants: given 3; allowed: the path"),
        (
            TOO_FAST,
            "",
            "mine.yaml:8: constants.cluster.network.intra_bus_bytes_per_s: 900 GB/s; allowed: at most the links' 300",
        ),
    ],
)
def test_what_is_refused_in_one_line(spec, lines, own, message):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        spec(lines, own=own)
    assert message in str(error.value)
