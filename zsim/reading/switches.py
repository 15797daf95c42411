"""Switches that depend on the age of PyTorch: torch.compile and the implementation of Adam, refused or ignored."""

from dataclasses import dataclass
from typing import Any

from zsim.model_spec import CompileScope
from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.runtime import Runtime
from zsim.spec import OptimizerImplementation
from zsim.units import shown

_PARAMS = ("optimizer", "params")
_READ = ("torch_adam", "fused", "foreach")


@dataclass(frozen=True, slots=True)
class ResolvedOptimizer:
    """The implementation, and what to tell the user."""

    implementation: OptimizerImplementation
    warnings: tuple[str, ...] = ()


def resolve_optimizer(experiment: Experiment, runtime: Runtime) -> ResolvedOptimizer:
    """`train.optimizer_implementation`, else what the DeepSpeed configuration asks for, else the framework's default.

    DeepSpeed takes its own FusedAdam unless `optimizer.params.torch_adam` is true (DeepSpeed runtime/engine.py,
    `get_optimizer_configuration`); torch.optim takes `foreach` since PyTorch 2.0, before that `for_loop`.

    Raises:
        InputError: what the software of the runtime does not have yet, or a parameter that is no switch.

    """
    given = experiment.settings.train.optimizer_implementation
    params = _params(experiment)
    # The reference engine takes the same of torch.optim's implementations by default.
    # Megatron-LM takes Apex' FusedAdam.
    is_deepspeed = runtime.framework in {"deepspeed", "reference", "megatron"}
    if given is not None:
        _check(given, is_deepspeed, runtime, experiment.where("train", "optimizer_implementation"))
        return ResolvedOptimizer(given, tuple(_ignored(params, "train.optimizer_implementation decides")))
    if not is_deepspeed:
        ignored = _ignored(params, f"{experiment.settings.runtime} takes the optimizer of train")
        return ResolvedOptimizer(runtime.torch_optimizers[0], tuple(ignored))
    if not params.get("torch_adam"):
        others = {name: value for name, value in params.items() if name != "torch_adam"}
        return ResolvedOptimizer("fused", tuple(_ignored(others, "torch_adam is not true, DeepSpeed's FusedAdam runs")))
    wanted = _of_torch(params, runtime)
    name = "fused" if params.get("fused") else "foreach"
    _check(wanted, False, runtime, experiment.where("deepspeed", *_PARAMS, name))
    return ResolvedOptimizer(wanted)


def _of_torch(params: dict[str, bool | None], runtime: Runtime) -> OptimizerImplementation:
    """As torch.optim.Adam takes its two arguments."""
    if params.get("fused"):
        return "fused"
    match params.get("foreach"):
        case True:
            return "foreach"
        case False:
            return "for_loop"
        case _:
            return runtime.torch_optimizers[0]


def _params(experiment: Experiment) -> dict[str, bool | None]:
    """The switches among `optimizer.params` of the DeepSpeed configuration."""
    section: Any = experiment.settings.deepspeed or {}
    for key in _PARAMS:
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        return {}
    found = {name: section[name] for name in _READ if section.get(name) not in (None, "auto")}
    for name, value in found.items():
        if not isinstance(value, bool):
            place = experiment.where("deepspeed", *_PARAMS, name)
            raise InputError(f"{place}: given {shown(value)}; allowed: true or false")
    return found


def _check(wanted: OptimizerImplementation, has_own: bool, runtime: Runtime, where: str) -> None:
    """FusedAdam comes with DeepSpeed; torch.optim has had for_loop alone before PyTorch 2.0."""
    allowed = {*runtime.torch_optimizers, *(("fused",) if has_own else ())}
    if wanted not in allowed:
        raise InputError(
            f"{where}: {wanted} is younger than software {runtime.software} of {runtime.document.name};"
            f" allowed: {', '.join(sorted(allowed))}"
        )


def _ignored(params: dict[str, bool | None], reason: str) -> list[str]:
    return [f"deepspeed.optimizer.params.{name} has no effect: {reason}" for name in params]


def compile_scope(experiment: Experiment, runtime: Runtime, stage: int) -> tuple[CompileScope, tuple[str, ...]]:
    """What torch.compile makes one graph of, and what to tell the user.

    DeepSpeed's stage 3 hooks every nn.Module, and a hook is a break of the graph. DDP's hooks are those of gradients,
    FSDP's those of whole blocks (torchtitan compiles each block by itself): a block is one graph.

    Raises:
        InputError: software without torch.compile.

    """
    if not experiment.settings.model.compile:
        return "none", ()
    if not runtime.torch_compile:
        place = experiment.where("model", "compile")
        raise InputError(
            f"{place}: torch.compile is younger than software {runtime.software} of {runtime.document.name};"
            " allowed: false, or a runtime with PyTorch 2"
        )
    if stage == 3:
        reason = "the hooks of stage 3 break the graph at each module: only what is inside one is fused"
        return "module", (f"model.compile: {reason}, and each pays for a call of its own graph",)
    return "block", ()
