"""The program of one layer, forward and backward, as `zsim show` prints it, for each generation of the schedule.

A change of a program shows as a difference of text. If it is meant, `python tests/test_golden_programs.py` writes the
new text into tests/golden; the difference is then part of the review.
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from strategy_cases import MATRIX, bert, gpt, resolved

from zsim import programs
from zsim.writing.listing import program_lines

GOLDEN = Path(__file__).parent / "golden"
LAYER = 1
"""The middle of three: both neighbours are blocks."""

BUCKETS = {"reduce_bucket_size": 6 * MATRIX, "contiguous_gradients": True}
STAGE_3 = BUCKETS | {"stage": 3, "stage3_param_persistence_threshold": 2_000, "stage3_prefetch_bucket_size": 2 * MATRIX}
STAGE_3 |= {"stage3_max_live_parameters": 12 * MATRIX, "stage3_max_reuse_distance": 8 * MATRIX}
STAGE_2 = BUCKETS | {"stage": 2, "overlap_comm": True}
MICS_OVER_NODES = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}

OVERLAPPED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")

CASES = {
    "zero3_deepspeed-0.5.4": ("deepspeed-0.5.4", STAGE_3),
    "zero3_deepspeed-0.5.10": ("deepspeed-0.5.10", STAGE_3),
    "zero3_deepspeed-0.6.0": ("deepspeed-0.6.0", STAGE_3),
    "zero3_deepspeed-0.19": ("deepspeed-0.19", STAGE_3),
    "zero2_deepspeed-0.5.4": ("deepspeed-0.5.4", STAGE_2),
    "zero2_deepspeed-0.19": ("deepspeed-0.19", STAGE_2),
    "zero3_reference": ("reference", STAGE_3),
    "zero2_reference": ("reference", STAGE_2),
    "hpz_deepspeed-0.19": ("deepspeed-0.19", STAGE_3 | {"zero_hpz_partition_size": 2}),
    "mics_deepspeed-0.18": ("deepspeed-0.18", STAGE_3 | {"mics_shard_size": 2}),
    "mics_hierarchical_deepspeed-0.18": ("deepspeed-0.18", STAGE_3 | MICS_OVER_NODES),
    "ddp": ("ddp", None),
    "ddp_compiled_selective": ("ddp", None),
    "fsdp1": ("fsdp1", None),
    "fsdp1_hybrid": ("fsdp1", {"sharding_strategy": "HYBRID_SHARD", "use_orig_params": True}),
    "fsdp2": ("fsdp2", None),
    "fsdp2_mesh": ("fsdp2", {"mesh": [2, 4], "reshard_after_forward": 2, "mixed_precision": {"reduce_dtype": "fp32"}}),
    "megatron-lm": ("megatron-lm", {}),
    "megatron-core_distributed": (
        "megatron-core",
        {"ddp_bucket_size": 6 * MATRIX} | dict.fromkeys(OVERLAPPED, True),
    ),
    "zero1_megatron-deepspeed": ("megatron-deepspeed", BUCKETS | {"stage": 1}),
}

SHAPES = {"hpz_deepspeed-0.19": (2, 2), "mics_deepspeed-0.18": (2, 2), "mics_hierarchical_deepspeed-0.18": (4, 2)}
"""Nodes and GPUs of each, where they are not one node of four."""


def text(name, folder):
    """The lines of one case."""
    runtime, settings = CASES[name]
    sharded = runtime.startswith("fsdp")
    section = {"fsdp": settings, "nodes": 2, "precision": "bf16"} if sharded else {"zero": settings}
    if runtime in {"megatron-lm", "megatron-core"}:
        section = {"megatron": settings}
    if name in SHAPES:
        section |= dict(zip(("nodes", "gpus"), SHAPES[name], strict=True))
    # As large as DDP's buckets, so that some of them close within the layer.
    model = bert(hidden=1024) if runtime == "ddp" else bert()
    if "megatron" in runtime:
        model, section["activation_checkpointing"] = gpt(), "full"
    if name == "ddp_compiled_selective":
        model["compile"], section["activation_checkpointing"] = True, "selective"
    shown = programs(resolved(folder, runtime, **section, model=model))
    lines = [line for phase in ("forward", "recompute", "backward") for line in program_lines(shown, phase, LAYER)]
    # Events are numbered anew in order of appearance, so that another layer's events do not show here.
    numbers: dict[str, int] = {}
    renumbered = (
        re.sub(r"(?<=event=)\d+", lambda found: str(numbers.setdefault(found[0], len(numbers))), line) for line in lines
    )
    return "".join(f"{line}\n" for line in renumbered if not line.startswith("#"))


@pytest.mark.parametrize("name", CASES)
def test_program_of_a_layer(name, tmp_path):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert text(name, tmp_path).splitlines() == expected.splitlines()


def test_every_golden_file_has_a_case():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def _write_all() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            (GOLDEN / f"{name}.txt").write_text(text(name, Path(folder)), encoding="utf-8")
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    _write_all()
