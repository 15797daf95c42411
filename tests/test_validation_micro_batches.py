"""A step of many micro-batches, continued from two short ones, against the whole step."""

from dataclasses import asdict, replace

import pytest

from zsim.pipeline import load, resolve, simulate
from zsim.validation.conventions import prediction
from zsim.validation.micro_batches import predicted

EXPERIMENT = """
question: How long is a step of many micro-batches?
model: {{preset: gpt2-124m, attention: flash}}
cluster: {{topology: p4d.24xlarge, nodes: 2}}
runtime: {runtime}
train: {{micro_batch: {micro_batch}, gradient_accumulation: {number}, seq_len: 1024, precision: bf16}}
{more}
"""
RUNS = {
    "fsdp1": "",
    "fsdp2": "",
    "ddp": "",
    "deepspeed-0.19": "deepspeed: {zero_optimization: {stage: 3}, bf16: {enabled: true}}",
    "deepspeed-0.6.0": "deepspeed: {zero_optimization: {stage: 2}, bf16: {enabled: true}}",
}


def spec_of(tmp_path, runtime, micro_batch, number):
    path = tmp_path / "run.yaml"
    path.write_text(EXPERIMENT.format(runtime=runtime, micro_batch=micro_batch, number=number, more=RUNS[runtime]))
    return resolve(load(path))


@pytest.mark.parametrize("runtime", RUNS)
@pytest.mark.parametrize("number", [8, 11])
def test_as_the_whole_step(tmp_path, runtime, number):
    spec = spec_of(tmp_path, runtime, 4, number)
    whole, continued = prediction(spec, simulate(spec).metrics), predicted(spec)
    found, expected = asdict(continued), asdict(whole)
    assert 0.85 < found.pop("peak_memory_bytes") / expected.pop("peak_memory_bytes") <= 1
    assert found == pytest.approx(expected, rel=1e-6)


def test_few_micro_batches_are_simulated_as_they_are(tmp_path):
    spec = spec_of(tmp_path, "fsdp2", 4, 3)
    assert predicted(spec) == prediction(spec, simulate(spec).metrics)


def test_where_the_cache_is_flushed_the_whole_step_is_simulated(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, "fsdp1", 4, 9)
    seen = []

    def flushing(of):
        seen.append(of.train.gradient_accumulation)
        found = simulate(of)
        return replace(found, metrics=replace(found.metrics, num_alloc_retries=1))

    monkeypatch.setattr("zsim.validation.micro_batches.simulate", flushing)
    assert predicted(spec) == prediction(spec, simulate(spec).metrics)
    assert seen == [3, 4, 9]
