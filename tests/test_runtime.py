"""Runtimes: one version of a framework on one generation of GPUs."""

from dataclasses import fields
from pathlib import Path

import pytest

from zsim.reading import data
from zsim.reading.documents import InputError
from zsim.reading.runtime import open_runtime, resolve_runtime
from zsim.software import HostCosts, StackSpec
from zsim.spec import Optimisations

HERE = Path()
VERSIONS = ("deepspeed-0.5.4", "deepspeed-0.5.10", "deepspeed-0.6.0", "deepspeed-0.19", "ddp")


def runtime(name, base=HERE, generation="ampere"):
    return resolve_runtime(open_runtime(name, base, "runtime"), generation)


@pytest.fixture
def own(tmp_path):
    """A runtime and its software of the user's own, as texts to change."""
    (tmp_path / "software").mkdir()
    numbers = {
        f.name: (
            "{value: 1 us, origin: assumed, source: s, range: [0 us, 2 us]}"
            if f.name.endswith("_s")
            else "{value: 0.5, origin: measured, source: s}"
        )
        for f in (*fields(StackSpec), *fields(HostCosts))
    }
    numbers["misaligned_slowdown"] = "{value: 2, origin: measured, source: s}"
    numbers |= {
        "tf32": "false",
        "collectives_record_stream": "false",
        "one_event_queue": "false",
        "nccl_version": '"2.10"',
    }
    numbers["launch_queue_depth"] = "{value: 1024, origin: measured, source: s}"
    numbers["gemm_efficiency"] = "{by_generation: {ampere: {value: 0.7, origin: measured, source: s}}}"
    stack = "".join(f"  {f.name}: {numbers[f.name]}\n" for f in fields(StackSpec))
    host = "".join(f"  {f.name}: {numbers[f.name]}\n" for f in fields(HostCosts) if f.name != "visit_s")
    switches = {f.name: "true" for f in fields(Optimisations)} | {
        "all_gather_sync": "stream",
        "reduce_sync": "host",
        "limiter_depth": "2",
        "all_gather_form": "base",
        "reduce_scatter_form": "list",
        "parameter_gather_form": "list",
        "bucket_sync": "device",
    }
    text = "runtime: mine\nframework: deepspeed\nsoftware: mine\npersistence_inclusive: true\n"
    text += "host:\n  visit_s: {value: 40 us, origin: derived, source: s, range: [30 us, 50 us]}\n"
    text += "  narrow_s: {value: 3 us, origin: derived, source: s}\n"
    text += "optimisations:\n" + "".join(f"  {name}: {value}\n" for name, value in switches.items())

    def write(change=("", ""), software_change=("", "")):
        assert change[0] in text
        software = f"software: mine\ntorch: {{compile: false, optimizers: [for_loop]}}\nstack:\n{stack}host:\n{host}"
        assert software_change[0] in software
        (tmp_path / "mine.yaml").write_text(text.replace(*change, 1))
        (tmp_path / "software" / "mine.yaml").write_text(software.replace(*software_change, 1))
        return tmp_path

    return write


def test_own_host_costs_beat_those_of_the_software(own):
    spec, constants = runtime("mine.yaml", own())
    assert spec.host.visit_s == 40e-6
    assert spec.host.narrow_s == 3e-6
    assert spec.host.event_s == 1e-6
    assert spec.stack.gemm_efficiency == 0.7
    assert (spec.stack.launch_queue_depth, spec.optimisations.limiter_depth) == (1024, 2)
    paths = [constant.path for constant in constants]
    assert len(paths) == len(set(paths))
    assert {f"runtime.host.{f.name}" for f in fields(HostCosts)} <= set(paths)


@pytest.mark.parametrize(
    ("change", "software_change", "message"),
    [
        (("  visit_s:", "  visit_:"), ("", ""), "host.visit_: unknown key; did you mean 'visit_s'"),
        (("", ""), ("  event_s:", "  evnt_s:"), "host.evnt_s: unknown key; did you mean 'event_s'"),
        (("  visit_s: {value: 40 us, origin: derived, source: s, range: [30 us, 50 us]}\n", ""), ("", ""),
         "missing here and in the software: visit_s"),
        (("  defragmentation: true\n", ""), ("", ""), "optimisations.defragmentation is missing"),
        (("  defragmentation: true", "  defragmentation: 1"), ("", ""), "given 1; allowed: true or false"),
        (("all_gather_form: base", "all_gather_form: bse"), ("", ""), "given 'bse'; did you mean 'base'"),
        (("limiter_depth: 2", "limiter_depth: -1"), ("", ""), "given -1; allowed: a whole number from 0"),
        (("framework: deepspeed", "framework: deepsped"), ("", ""), "did you mean 'deepspeed'"),
        (("software: mine", "software: 1999"), ("", ""), "software: unknown '1999'; allowed: 2021, 2022, 2023, mine"),
        (("framework: deepspeed", "framework: ddp"), ("", ""), "ddp is missing"),
        (("host:", "ddp: {bucket_cap_mb: 1, first_bucket_mb: 1}\nhost:"), ("", ""), "given for framework deepspeed"),
        (("persistence_inclusive: true\n", ""), ("", ""), "persistence_inclusive is missing"),
        (("", ""), ("  kernel_floor_s: {value: 1 us", "  kernel_floor_s: {value: 1 GB"), "has the unit 'GB'"),
    ],
)  # fmt: skip
def test_a_slip_in_a_runtime_is_one_line(own, change, software_change, message):
    base = own(change, software_change)
    with pytest.raises(InputError) as error:
        runtime("mine.yaml", base)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_generation_without_numbers_is_an_error(own):
    with pytest.raises(InputError, match="no entry for GPU generation 'hopper'; given: ampere"):
        runtime("mine.yaml", own(), "hopper")


def test_buckets_of_ddp_are_mebibytes(own):
    base = own(("framework: deepspeed", "framework: ddp\nddp: {bucket_cap_mb: 25, first_bucket_mb: 1}"))
    spec, _ = runtime("mine.yaml", base)
    assert (spec.ddp_bucket_bytes, spec.ddp_first_bucket_bytes) == (25 * 2**20, 2**20)


@pytest.mark.parametrize("name", VERSIONS)
def test_shipped_runtimes_load(name):
    spec, constants = runtime(name)
    assert spec.name == name
    assert all(constant.source and constant.low <= constant.value <= constant.high for constant in constants)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepspeed-0.5.7", "its neighbours are deepspeed-0.5.4 and deepspeed-0.5.10"),
        ("deepspeed-0.7.3", "its neighbours are deepspeed-0.6.0 and deepspeed-0.18"),
        ("deepspeed-0.3.16", "its neighbours are deepspeed-0.5.4"),
        ("deepseed-0.6.0", "did you mean 'deepspeed-0.6.0'"),
        ("x", "allowed: composer-0.16, ddp, deepspeed-0.18, deepspeed-0.19"),
    ],
)
def test_an_unknown_version_names_its_neighbours(name, message):
    with pytest.raises(InputError) as error:
        runtime(name)
    assert message in str(error.value)


def test_versions_differ_where_the_article_says():
    before, after = runtime("deepspeed-0.5.4")[0].optimisations, runtime("deepspeed-0.6.0")[0].optimisations
    assert (before.all_gather_sync, after.all_gather_sync) == ("per_parameter", "stream")
    assert (before.broken_trace, after.broken_trace) == (True, False)
    assert set(VERSIONS) <= set(data.names("runtimes"))
