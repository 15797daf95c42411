"""What the reference engine needs of an experiment and the simulator does not: the optimizer and its numbers.

They stand where DeepSpeed has them: `optimizer` and `gradient_clipping` of the configuration.
"""

from typing import Any, Final

from zsim.reading.config import Experiment
from zsim.reading.documents import InputError
from zsim.reading.runtime import Runtime
from zsim.spec import OptimizerSpec, TrainSpec
from zsim.units import shown

_AUTO: Final = (None, "auto")
_SILENT_LR: Final = 1e-3
"""Of every optimizer that DeepSpeed makes, its own and torch's."""
_SILENT_WEIGHT_DECAY: Final = 0.0
"""Of DeepSpeed's Adam in either mode (ops/adam/fused_adam.py, cpu_adam.py); `torch_adam` asks for torch's."""
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "lr": (0.0, 1e3),
    "eps": (0.0, 1.0),
    "weight_decay": (0.0, 1e3),
    "momentum": (0.0, 1.0),
    "gradient_clipping": (0.0, 1e9),
}


def resolve_optimizer_settings(experiment: Experiment, runtime: Runtime) -> OptimizerSpec:
    """The optimizer of the DeepSpeed configuration; what a section does not name has DeepSpeed's default.

    Without a section, and for what it leaves to a Trainer ("auto"), ours.
    As with DeepSpeed `Adam` is AdamW unless `adam_w_mode` is false (runtime/engine.py, `_configure_basic_optimizer`).

    Raises:
        InputError: a number that no optimizer takes.

    """
    config = experiment.settings.deepspeed
    if runtime.framework != "reference" or config is None:
        return OptimizerSpec()
    section: dict[str, Any] = config.get("optimizer") or {}
    params: dict[str, Any] = section.get("params") or {}
    numbers = {"gradient_clipping": config.get("gradient_clipping")}
    numbers |= {name: params.get(name) for name in _BOUNDS if name != "gradient_clipping"}
    values: dict[str, Any] = {
        name: _number(value, *_BOUNDS[name], _where(experiment, name))
        for name, value in numbers.items()
        if value not in _AUTO
    }
    if (betas := params.get("betas")) not in _AUTO:
        values["betas"] = _betas(betas, _where(experiment, "betas"))
    if section:
        silent = {"lr": _SILENT_LR} | ({} if params.get("torch_adam") else {"weight_decay": _SILENT_WEIGHT_DECAY})
        values = {name: value for name, value in silent.items() if name not in params} | values
    kind = str(section.get("type", "AdamW")).lower()
    if kind == "sgd":
        return OptimizerSpec("SGD", **{"weight_decay": 0.0} | values)
    is_adam = kind == "adam" and params.get("adam_w_mode") is False
    # Without decoupled decay torch.optim.Adam has none by default.
    return OptimizerSpec("Adam", **{"weight_decay": 0.0} | values) if is_adam else OptimizerSpec("AdamW", **values)


def check_reference(experiment: Experiment, runtime: Runtime, train: TrainSpec) -> None:
    """The engine trains in bf16 and fp32.

    Raises:
        InputError: another precision.

    """
    if runtime.framework == "reference" and train.precision == "fp16":
        place, name = experiment.where("train", "precision"), experiment.settings.runtime
        raise InputError(f"{place}: given fp16; {name} has no loss scaling; allowed: bf16 or fp32")


def _where(experiment: Experiment, name: str) -> str:
    keys = ("gradient_clipping",) if name == "gradient_clipping" else ("optimizer", "params", name)
    return experiment.where("deepspeed", *keys)


def _betas(given: object, where: str) -> tuple[float, float]:
    if not isinstance(given, list) or len(given) != 2:
        raise InputError(f"{where}: given {shown(given)}; allowed: two numbers from 0 to below 1")
    first, second = (_number(beta, 0.0, 1.0, where) for beta in given)
    if 1.0 in {first, second}:
        raise InputError(f"{where}: given {shown(given)}; allowed: two numbers from 0 to below 1")
    return first, second


def _number(given: object, lowest: float, highest: float, where: str) -> float:
    """YAML reads 1e-4 as text; json does not."""
    try:
        value = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else None
    except ValueError:
        value = None
    if value is None or not lowest <= value <= highest:
        raise InputError(f"{where}: given {shown(given)}; allowed: a number from {lowest:g} to {highest:g}")
    return value
