"""One round of all measurements of a device: the numbers of a data file, by their paths in the spec."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

from reference.calibration.clock import clock
from reference.calibration.engine_steps import EngineSteps
from reference.calibration.host import OperatorCosts, VisitCosts
from reference.calibration.operators import PHASES, Passes, watched
from reference.calibration.round_trips import RoundTrips
from reference.communication import communicators
from reference.sharding import COMMUNICATORS
from reference.sharding.settings import from_spec
from zsim.calibration.work import PassWork, work_of
from zsim.spec import Spec

Precision = Literal["fp32", "bf16"]
DTYPES: Final[dict[Precision, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMEOUT_S: Final = 600.0


class Figures(Protocol):
    """Measures everything once."""

    def round(self) -> dict[str, float]:
        """Path of a constant -> what it was in this round, SI units."""

    def close(self) -> None:
        """Ends what runs beside."""


class CoreFigures:
    """Of one core: products and memory-bound kernels in both precisions, update, copies, host and hooks."""

    def __init__(self, spec: Spec) -> None:
        cpu = torch.device("cpu")
        if not dist.is_initialized():
            # The engine's communicators need a group, were it of this process alone.
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._spec = spec
        self._precision: Precision = "fp32" if spec.train.precision == "fp32" else "bf16"
        self._in = {name: with_precision(spec, name) for name in DTYPES}
        self._work: dict[Precision, PassWork] = {name: work_of(each) for name, each in self._in.items()}
        self._passes = {name: Passes(each, DTYPES[name], cpu) for name, each in self._in.items()}
        settings = from_spec(spec)
        made = communicators(COMMUNICATORS, ring=settings.optimisations.ring_collectives, timeout_s=TIMEOUT_S)
        self._communicators = made
        self._trips = RoundTrips()
        self._operators, self._visits = OperatorCosts(settings.dtype, cpu), VisitCosts(settings, made)
        self._engines = {name: EngineSteps(each) for name, each in self._in.items()}

    def round(self) -> dict[str, float]:
        """See `Figures`."""
        host = self._operators.seconds() | self._visits.seconds()
        asked = self._engines[self._precision]
        activities = asked.host_seconds() | self._trips.seconds()
        found = {f"runtime.host.{activity}_s": taken for activity, taken in activities.items()}
        found |= self._host_figures(host, found.get("runtime.host.visit_s", 0.0))
        for name, engine in self._engines.items():
            found |= self._kernels(name)
            moved = engine.bytes_per_s(host["op_forward"])
            if "update" in moved:
                found[f"cluster.device.{name}_update_bytes_per_s"] = moved["update"]
            if engine is asked and "copy" in moved:
                found["cluster.device.copy_bytes_per_s"] = moved["copy"]
        found["cluster.device.attention_flop_per_s"] = self._attention()
        return found

    def close(self) -> None:
        """See `Figures`."""
        self._trips.close()
        self._visits.close()
        for each in self._engines.values():
            each.close()
        for communicator in self._communicators.values():
            communicator.close()

    @staticmethod
    def _host_figures(host: dict[str, float], decision_s: float) -> Iterator[tuple[str, float]]:
        """An operator, and a visit of a module: in forward what it decides is a cost of its own."""
        for name in ("op_forward", "op_backward"):
            yield f"runtime.host.{name}_s", host[name]
        yield "runtime.host.module_call_s", max(0.0, host["visit_forward"] - decision_s)
        yield "runtime.host.visit_backward_s", host["visit_backward"]

    def _kernels(self, name: Precision) -> dict[str, float]:
        seconds, work = self._passes[name].seconds(), self._work[name]
        product_s, kernel_s = (
            sum(seconds.get((phase, kind), 0.0) for phase in PHASES) for kind in ("product", "kernel")
        )
        return {
            f"cluster.device.{name}_gemm_flop_per_s": work.gemm_flop / product_s,
            f"cluster.device.{name}_kernel_bytes_per_s": work.kernel_bytes / kernel_s,
        }

    def _attention(self) -> float:
        """As one kernel, forward and backward, in the precision of the experiment."""
        model, train = self._spec.model, self._spec.train
        shape = (train.micro_batch, model.heads, train.seq_len, model.head_dim)
        query, key, value = (torch.randn(shape, dtype=DTYPES[self._precision], requires_grad=True) for _ in range(3))
        calls = watched(
            clock(torch.device("cpu")),
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=model.causal).sum(),
            backward=True,
        )
        work = work_of(replace(self._spec, model=replace(model, attention="sdpa")))
        taken_s = sum(taken for operator, taken in calls if operator.kind == "attention")
        return work.attention_flop / model.num_layers / taken_s


def with_precision(spec: Spec, name: Precision) -> Spec:
    """The experiment in another precision, gradients on the wire in the same."""
    nbytes = DTYPES[name].itemsize
    return replace(spec, train=replace(spec.train, precision=name, communication_bytes=nbytes))
