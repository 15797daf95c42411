"""Model states of one GPU against the ZeRO paper's figures: `python -m benchmarks.memory`.

By formula, and as what the programs of DeepSpeed's stages allocate before the first step.
"""

from functools import cache

import zsim
from benchmarks import EXPERIMENTS, Bar, bars_table, table
from zsim.figures.states import STAGES, model_states
from zsim.ops import SETUP, MemoryCategory

STATES: frozenset[MemoryCategory] = frozenset({"parameters", "gradients", "optimizer"})
PAPER = {0: "120", 1: "31.4", 2: "16.6", 3: "1.9"}
"""GB of a model of 7.5B parameters on 64 GPUs (Rajbhandari et al., ZeRO, SC20, figure 1)."""
BILLION = 1e9
MEBIBYTE = 2**20
SMALL_PARAMETERS = 124_475_904
"""GPT-2 with its vocabulary padded to 50,304 rows."""
SMALL_RANKS = 4
SMALL_SAVING_MIB = 1068
"""12 bytes a parameter, three quarters of them."""


def gigabytes(num_parameters: float, num_ranks: int, stage: int) -> float:
    """Model states of one rank by formula."""
    return model_states(round(num_parameters), num_ranks, stage).total / BILLION


def digits_like(value: float, printed: str) -> str:
    """The value with as many decimals as the printed figure has."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


def small_saving_mib() -> float:
    """What stage 1 saves over stage 0 for the small model, by formula."""
    before, after = (model_states(SMALL_PARAMETERS, SMALL_RANKS, stage).total for stage in (0, 1))
    return (before - after) / MEBIBYTE


@cache
def allocated(stage: int, *overrides: str) -> tuple[int, dict[str, int]]:
    """Parameters of a model, and the most bytes of each kind of state that its simulated step holds."""
    zero = f"deepspeed.zero_optimization.stage={stage}"
    path = EXPERIMENTS / "roberta_10b_p4d_after.yaml"
    result = zsim.simulate(zsim.load(path, ["train.micro_batch=1", zero, *overrides]))
    held: dict[str, int] = dict.fromkeys(sorted(STATES), 0)
    most = dict(held)
    for sample in result.trace.memory:
        if sample.category in STATES:
            held[sample.category] += sample.delta_bytes
        if sample.key is not None and sample.key.phase not in SETUP:
            most = {name: max(nbytes, held[name]) for name, nbytes in most.items()}
    return result.metrics.work.num_parameters, most


def bars() -> list[Bar]:
    """To the digits printed."""
    found = []
    for stage, printed in PAPER.items():
        value = digits_like(gigabytes(7.5e9, 64, stage), printed)
        found.append(Bar(f"states of 7.5B on 64 GPUs, stage {stage}", f"{value} GB", f"{printed} GB", value == printed))
    trillion = digits_like(gigabytes(1e12, 1024, 3), "16")
    found.append(Bar("states of 1T on 1,024 GPUs, stage 3", f"{trillion} GB", "16 GB", trillion == "16"))
    saving = round(small_saving_mib())
    found.append(
        Bar(
            f"stage 0 to 1, {SMALL_PARAMETERS:,} parameters on {SMALL_RANKS} GPUs, saves",
            f"{saving:,} MiB",
            f"{SMALL_SAVING_MIB:,} MiB",
            saving == SMALL_SAVING_MIB,
        )
    )
    return found


def allocated_table() -> str:
    """What the programs hold at most, of what the formula gives."""
    rows = []
    for stage in STAGES:
        num_parameters, most = allocated(stage, "model.preset=gpt-7.5b")
        formula = model_states(num_parameters, 64, stage)
        by_name = {"parameters": formula.parameters, "gradients": formula.gradients, "optimizer": formula.optimizer}
        cells = [f"{most[name] / BILLION:.2f} of {by_name[name] / BILLION:.2f}" for name in by_name]
        rows.append((f"stage {stage}", *cells))
    return table(["gpt-7.5b on 64 GPUs, GB", "parameters", "gradients", "optimizer"], rows)


def report() -> str:
    """Formulas against the paper, and what the programs hold at most."""
    num_parameters, _ = allocated(0, "model.preset=gpt-7.5b")
    note = (
        f"What the program of each stage holds at most of each kind, of what the formula gives, for a model of "
        f"{num_parameters:,} parameters. Stages 2 and 3 hold more than the formula, because a gradient stays whole "
        f"until its bucket is reduced; stage 3 also keeps parameters below the persistence threshold whole. Buckets, "
        f"gathered parameters, activations and temporary buffers come on top; `zsim memory` lists them."
    )
    return "\n\n".join((bars_table(bars()), note, allocated_table()))


if __name__ == "__main__":
    print(report())
