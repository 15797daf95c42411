"""FLOP that a step of an experiment takes, counted on its programs."""

from collections.abc import Sequence

from zsim.figures.metrics import ModelWork
from zsim.model import build
from zsim.ops import Compute, Program
from zsim.spec import Spec


def model_work(spec: Spec, roles: Sequence[Program]) -> ModelWork:
    """FLOP of one step of one rank, counted on the GEMMs of its program.

    Both figures follow the field's convention (`ops.Attention.flop`): attention counts all pairs of tokens, although
    causal kernels skip half of them, and hardware FLOP add what checkpointing repeats, not what such a kernel repeats
    within. Time is that of the FLOP executed.
    Model FLOP are those of forward and backward as the run computes them, without recomputation; the usual 6ΨT of T
    tokens is what they come to for a dense model that is trained as a whole, but for attention. So forward counts twice
    the active parameters; backward as much again for the gradients of inputs, down to the lowest trained parameter,
    and once more for the gradients of the trained weights alone: with all but adapters frozen nearly 4ΨT together.
    """
    # Steps are alike unless batches differ in length.
    num_steps = spec.noise.steps if spec.noise.shortest_seq_len else 1
    computes = [op for op in roles[0].ops if isinstance(op, Compute) and 0 <= op.key.step < num_steps]
    hardware_flop = sum(gemm.flop for op in computes for gemm in op.gemms) // num_steps
    again = (gemm.flop for op in computes for gemm in op.gemms if op.key.phase == "recompute")
    recomputed_flop = sum(again) // num_steps
    graph = build(spec.model, spec.train)
    return ModelWork(
        model_flop_per_rank=hardware_flop - recomputed_flop,
        hardware_flop_per_rank=hardware_flop,
        executed_flop_per_rank=sum(gemm.executed_flop for op in computes for gemm in op.gemms) // num_steps,
        num_parameters=graph.num_parameters,
        num_trained_parameters=graph.num_trained_parameters,
        num_active_parameters=graph.num_active_parameters,
    )
