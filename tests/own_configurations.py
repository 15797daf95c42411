"""Experiments around a DeepSpeed configuration: text of a file, or an inline mapping."""

import json

import pytest

from zsim.reading.resolution import load, resolve
from zsim.spec import Spec

OLD, NEW = "deepspeed-0.6.0", "deepspeed-0.19"
BASE = {
    "question": "What does my file do?",
    "model": {"preset": "llama2-7b", "attention": "flash"},
    "cluster": {"topology": "p4d.24xlarge", "nodes": 1},
    "train": {"seq_len": 512, "activation_checkpointing": "full"},
}


def resolved_with(
    folder,
    config,
    *overrides,
    runtime=NEW,
    micro_batch=2,
    gradient_accumulation=None,
    precision="bf16",
    name="ds.json",
    **changes,
) -> Spec:
    """An experiment written into `folder`, its configuration into a file of its own where it is text."""
    train = {"micro_batch": micro_batch, "gradient_accumulation": gradient_accumulation, "precision": precision}
    train = BASE["train"] | {key: value for key, value in train.items() if value is not None}
    if isinstance(config, str):
        (folder / name).write_text(config, encoding="utf-8")
        config = name
    experiment = BASE | {"runtime": runtime, "train": train, "deepspeed": config} | changes
    path = folder / "mine.yaml"
    path.write_text(json.dumps(experiment), encoding="utf-8")
    return resolve(load(path, overrides))


def refusal(read, *arguments, **changes) -> str:
    """The one line with which `read` refuses."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        read(*arguments, **changes)
    return str(error.value)
