"""What EFA costs against InfiniBand, by stage: `python -m benchmarks.fabric_loss`.

The article: moving from an InfiniBand cluster to EFA, stage 3 loses about twice as much throughput as stage 2. Both
clusters have eight nodes of eight A100-40GB; the DeepSpeed configuration is that of the 10B experiment.
"""

from dataclasses import dataclass

from benchmarks import Bar, bars_table, predict, table
from zsim.figures.metrics import Metrics

EXPERIMENT = "roberta_10b_p4d_before"
INFINIBAND = "cluster.topology=dgx-a100-40gb"
RUNTIMES = {"before": "deepspeed-0.5.4", "after": "deepspeed-0.6.0"}
RATIO_BOUNDS = (1.3, 2.8)
PARITY_BAR = 0.12


@dataclass(frozen=True, slots=True)
class Setting:
    """A stage with its overlap_comm; stage 3 has it on by default, stage 2 of these versions off."""

    stage: int
    overlap_comm: bool

    @property
    def overrides(self) -> tuple[str, str]:
        """As for `--set`."""
        zero = "deepspeed.zero_optimization"
        return f"{zero}.stage={self.stage}", f"{zero}.overlap_comm={str(self.overlap_comm).lower()}"

    def __str__(self) -> str:
        return f"stage {self.stage}, overlap_comm {str(self.overlap_comm).lower()}"


STAGE_3 = Setting(3, overlap_comm=True)
STAGE_2 = (Setting(2, overlap_comm=True), Setting(2, overlap_comm=False))
"""The first has the very configuration of stage 3, the second DeepSpeed's default."""


def on_efa(setting: Setting, when: str) -> Metrics:
    """The run on p4d.24xlarge."""
    return predict(EXPERIMENT, f"runtime={RUNTIMES[when]}", *setting.overrides)


def on_infiniband(setting: Setting, when: str) -> Metrics:
    """The same on DGX A100."""
    return predict(EXPERIMENT, f"runtime={RUNTIMES[when]}", INFINIBAND, *setting.overrides)


def loss(setting: Setting, when: str) -> float:
    """Share of the throughput on InfiniBand that is lost on EFA."""
    return 1 - on_efa(setting, when).samples_per_s / on_infiniband(setting, when).samples_per_s


def loss_ratio(setting: Setting) -> float:
    """How many times as much stage 3 loses as this stage 2, before."""
    return loss(STAGE_3, "before") / loss(setting, "before")


def parity(setting: Setting) -> float:
    """Throughput of this stage 2 over that of stage 3 on p4d, after, less one."""
    return on_efa(setting, "after").samples_per_s / on_efa(STAGE_3, "after").samples_per_s - 1


def bars() -> list[Bar]:
    """Stage 3 loses more, for both settings of stage 2; afterwards the two stages are level."""
    low, high = RATIO_BOUNDS
    ratios = [
        Bar(
            f"10B before, loss on EFA of stage 3 over {setting}",
            f"{loss_ratio(setting):.2f}",
            f"{low} to {high}",
            low <= loss_ratio(setting) <= high,
        )
        for setting in STAGE_2
    ]
    same = STAGE_2[0]
    level = Bar(
        f"10B after on p4d, throughput of {same} against stage 3",
        f"{parity(same):+.1%}",
        f"±{PARITY_BAR:.0%}",
        abs(parity(same)) <= PARITY_BAR,
    )
    return [*ratios, level]


def losses_table() -> str:
    """Steps and throughput on both fabrics."""
    rows = []
    for when, runtime in RUNTIMES.items():
        for setting in (STAGE_3, *STAGE_2):
            efa, infiniband = on_efa(setting, when), on_infiniband(setting, when)
            rows.append(
                (
                    f"{when} ({runtime}), {setting}",
                    f"{infiniband.step_time_s:.2f}",
                    f"{efa.step_time_s:.2f}",
                    f"{infiniband.samples_per_s:.1f}",
                    f"{efa.samples_per_s:.1f}",
                    f"{loss(setting, when):.1%}",
                )
            )
    return table(["10B, 64 GPUs", "dgx-a100 s", "p4d s", "dgx-a100 samples/s", "p4d samples/s", "loss on EFA"], rows)


def report() -> str:
    """Losses, their ratios, and stage 2 against stage 3 afterwards."""
    default = STAGE_2[1]
    note = f"With DeepSpeed's default, {default}, stage 2 is {parity(default):+.1%} from stage 3 after on p4d."
    return "\n\n".join((losses_table(), bars_table(bars()), note))


if __name__ == "__main__":
    print(report())
