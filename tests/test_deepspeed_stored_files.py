"""Configurations that people have published: each is read, or refused for its reason, in a folder that you name.

ZSIM_USER_FILES names the folder; without it these tests are skipped.
"""

import os
from functools import partial
from pathlib import Path

import pytest
from own_configurations import NEW, OLD, refusal, resolved_with

from zsim.writing.report import auto_lines

OWN = {"micro_batch": None, "precision": None}
"""Files that give batch and precision themselves."""
FP16 = {"precision": "fp16"}
OFFLOAD = "offload: not modelled yet"
HIDDEN_SIZES = ["reduce_bucket_size = 16,777,216", "prefetch_bucket_size = 15,099,494", "threshold = 40,960"]
READ = {
    "alpa_zero3.json": (OLD, OWN, 3, ["persitence_threshold: given 100,000", "It is 100,000 in this run"]),
    "axolotl_zero1.json": (NEW, {}, 1, ["auto: deepspeed.bf16.enabled = true"]),
    "axolotl_zero3_bf16.json": (NEW, {}, 3, ["sub_group_size = 0 is taken as", *HIDDEN_SIZES]),
    "bigscience_dump_requested.json": (
        OLD,
        OWN,
        3,
        ["given 81,920, but", "It is 100,000 in this run", "67,108,864 is within them", "60,397,980 has the 7 digits"],
    ),
    "ds_autotune_template_zero3.json": (NEW, {}, 3, ["allgather_bucket_size has no effect: it belongs to stages 1"]),
    "ds_sdma_allgather_zero3.json": (NEW, OWN, 3, ["allgather_bucket_size has no", "allgather_partitions has no"]),
    "llamafactory_ds_z0_config.json": (NEW, {}, 0, ["round_robin_gradients has no effect: stage 0 partitions nothing"]),
    "llamafactory_ds_z3_config.json": (NEW, {}, 3, ["16bit_weights_on_model_save has no effect", *HIDDEN_SIZES]),
}
"""Name -> runtime, what completes the file, stage, and what the report says among other lines."""
REFUSED = {
    "axolotl_zero2.json": ({}, OFFLOAD),
    "axolotl_zero3_bf16_cpuoffload_all.json": ({}, OFFLOAD),
    "bigscience_ds_zero2.json": (FP16, f"cpu_offload: given True; {OFFLOAD}"),
    "bigscience_ds_zero3.json": (FP16, OFFLOAD),
    "dse_bingbert_lamb_64k.json": (OWN, "sparse attention: not modelled yet"),
    "dse_onebitadam_nccl.json": (OWN, "given 'OneBitAdam' (1-bit compression of the momentum); only Adam's states"),
    "dse_sglang_nvme_gds.json": (OWN, f"offload_param: given 'nvme'; {OFFLOAD}"),
    "fastchat_s3.json": (FP16, OFFLOAD),
    "hf_ds_config_zero2.json": ({}, OFFLOAD),
    "hf_ds_config_zero3_zero_sentinels.json": (FP16, 'reduce_bucket_size: given 0, which stood for "auto" in 2021'),
    "llamafactory_ds_z2_autotp_config.json": ({}, "tensor parallelism: not modelled yet"),
    "llamafactory_ds_z3_offload_config.json": ({}, OFFLOAD),
    "llava_zero3_offload.json": ({}, OFFLOAD),
    "megds_moe_TEMPLATE.json": ({}, ":2: train_batch_size: the unquoted text 'CONFIG_BATCH_SIZE'"),
    "neox_1-3B.yml": (OWN, ":5: pipe_parallel_size: a key of GPT-NeoX"),
}
"""Name -> what completes the file, and the reason."""


@pytest.fixture
def read(tmp_path):
    """Resolves an experiment with a configuration."""
    return partial(resolved_with, tmp_path)


@pytest.fixture
def stored():
    folder = os.environ.get("ZSIM_USER_FILES")
    if not folder:
        pytest.skip("ZSIM_USER_FILES names no folder of stored configurations")
    return Path(folder, "ds_config")


def test_every_stored_file_has_an_expected_outcome(stored):
    assert {path.name for path in stored.iterdir()} == READ.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", READ)
def test_stored_files_that_are_read(read, stored, name):
    runtime, train, stage, parts = READ[name]
    spec = read({}, deepspeed=str(stored / name), runtime=runtime, **train)
    lines = [*spec.warnings, *auto_lines(spec.autos)]
    assert spec.zero.stage == stage
    assert [part for part in parts if not any(part in line for line in lines)] == []


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("runtime", [OLD, NEW])
def test_stored_files_that_are_refused(read, stored, name, runtime):
    train, reason = REFUSED[name]
    assert reason in refusal(read, {}, deepspeed=str(stored / name), runtime=runtime, **train)


def test_what_the_stored_requests_become(read, stored):
    """A log of 2021 asked for 81,920 and ran with 100,000."""
    spec = read({}, deepspeed=str(stored / "bigscience_dump_requested.json"), runtime=OLD, **OWN)
    sizes = (spec.zero.param_persistence_threshold, spec.zero.prefetch_bucket_size, spec.zero.reduce_bucket_size)
    assert sizes == (100_000, 60_397_980, 67_108_860)
    assert (spec.train.micro_batch, spec.train.precision) == (48, "fp16")
