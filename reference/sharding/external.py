"""Parameters that a module takes from another one, whose hooks it does not call.

nn.MultiheadAttention reads the weight of its output projection, a tied head that of the embedding. As DeepSpeed does
(runtime/zero/parameter_offload.py, ZeROOrderedDict), the table of a module's parameters tells when one is asked for
that is not here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from reference.sharding.sharding import ShardedParameter

Asked = Callable[[ShardedParameter], None]


class _Parameters(dict[str, nn.Parameter | None]):
    """`_parameters` of a module."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], sharded: Mapping[int, ShardedParameter], asked: Asked
    ) -> None:
        super().__init__(parameters)
        self._sharded = sharded
        self._asked = asked

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None and not parameter.numel() and id(parameter) in self._sharded:
            self._asked(self._sharded[id(parameter)])
        return parameter

    def __reduce__(self) -> Any:
        """A copy of the module is not watched."""
        return dict, (dict(self.items()),)


def watch(model: nn.Module, sharded: Mapping[int, ShardedParameter], asked: Asked) -> None:
    """Has `asked` called for each parameter that some module of the model is asked for while it is released.

    Args:
        model: all of its modules are watched.
        sharded: by id of the nn.Parameter.
        asked: makes it available.

    """
    for module in model.modules():
        module._parameters = _Parameters(module._parameters, sharded, asked)  # noqa: SLF001


def unwatch(model: nn.Module) -> None:
    """Ordinary tables again."""
    for module in model.modules():
        module._parameters = dict(module._parameters.items())  # noqa: SLF001
