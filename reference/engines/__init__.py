"""Who trains: `--engine reference|...`, all behind `engine.Engine`."""

from importlib import import_module
from typing import Final

from reference.device.recorder import Recorder
from reference.engines.engine import Engine, Outcome
from zsim.spec import Spec
from zsim.units import InputError

__all__ = ["ENGINES", "Engine", "Outcome", "create"]

ENGINES: Final = {name: f"reference.engines.{name}" for name in ("reference", "deepspeed", "fsdp2", "ddp")}
"""Module of each, loaded when it is asked for; its `create` makes one."""


def create(name: str, spec: Spec, *, seed: int, recorder: Recorder, timeout_s: float) -> Engine:
    """An engine with the experiment's model; all ranks call it alike, within a process group.

    Args:
        name: one of `ENGINES`.
        spec: the resolved experiment.
        seed: of the weights.
        recorder: is told what happens, by engines that say it.
        timeout_s: after which a wait for other ranks is an error.

    Raises:
        InputError: a ValueError: it asks for what the engine does not have.

    """
    if name not in ENGINES:
        raise InputError(f"--engine: given {name}; allowed: {', '.join(ENGINES)}")
    engine: Engine = import_module(ENGINES[name]).create(spec, seed=seed, recorder=recorder, timeout_s=timeout_s)
    return engine
