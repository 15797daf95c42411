"""What the processes of a run take from the resolved experiment."""

from dataclasses import asdict, dataclass

import torch

from zsim.spec import Optimisations, OptimizerImplementation, OptimizerSpec, Spec, ZeroSpec
from zsim.units import InputError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class OptimizerSettings(OptimizerSpec):
    """An experiment's optimizer, and which of torch.optim's implementations runs it."""

    implementation: OptimizerImplementation = "fused"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run."""

    zero: ZeroSpec
    optimisations: Optimisations
    optimizer: OptimizerSettings
    dtype: torch.dtype
    """Of parameters, gradients and activations; fp32 masters beside them where it is a 16-bit one."""
    gradient_accumulation: int
    persistence_inclusive: bool
    timeout_s: float = 60.0
    """After which a wait for other ranks is an error."""

    @property
    def gradient_clipping(self) -> float:
        """Largest norm of all gradients together; 0 for no limit."""
        return self.optimizer.gradient_clipping

    @property
    def element_bytes(self) -> int:
        """Of a parameter."""
        return self.dtype.itemsize

    @property
    def needs_master(self) -> bool:
        """Whether the optimizer works on an fp32 copy."""
        return self.dtype.itemsize < torch.float32.itemsize


def from_spec(spec: Spec, *, timeout_s: float = 60.0) -> Settings:
    """The settings of a resolved experiment.

    Raises:
        InputError: a ValueError: it asks for what the reference engine does not have.

    """
    if spec.train.precision not in _DTYPES:
        allowed = ", ".join(_DTYPES)
        raise InputError(f"precision {spec.train.precision}: the reference engine trains in {allowed}")
    dtype = _DTYPES[spec.train.precision]
    if spec.train.communication_bytes != dtype.itemsize:
        given = spec.train.communication_bytes
        raise InputError(
            f"communication_data_type of {given} bytes: the reference engine reduces gradients as they are, "
            f"{dtype.itemsize} bytes an element"
        )
    return Settings(
        zero=spec.zero,
        optimisations=spec.runtime.optimisations,
        optimizer=OptimizerSettings(**asdict(spec.optimizer), implementation=spec.train.optimizer_implementation),
        dtype=dtype,
        gradient_accumulation=spec.train.gradient_accumulation,
        persistence_inclusive=spec.runtime.persistence_inclusive,
        timeout_s=timeout_s,
    )
