"""From torch's hooks to a sharding's: which module visit goes on, in which phase, and whose kernels run.

Backward hooks hang on tensors, not on autograd functions of our own: a module's outputs get their gradient before its
backward begins, its inputs theirs when it is over. Modules whose inputs have no gradient (an embedding) end with the
micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reference.device import Device
from reference.sharding.sharding import HookedModule, Moment, ShardedParameter, Sharding, Visit
from zsim.ops import Key, Phase

_ACTIONS = "_actions_of_hooks"
"""Attribute of a tensor."""


class _Passage(NamedTuple):
    """One call of a module: its forward visit, and what its backward visit is matched with."""

    hooked: HookedModule
    visit: Visit


class Hooks:
    """Attaches a sharding to a model and keeps count of its visits."""

    def __init__(
        self,
        sharding: Sharding,
        device: Device,
        modules: Mapping[nn.Module, HookedModule],
        parameters: list[ShardedParameter],
    ) -> None:
        self.step = 0
        self.micro = 0
        self._sharding = sharding
        self._recorder = device.recorder
        self._device = device
        self._position = 0
        self._in_backward = False
        self._layer = -1
        """Of the visit that goes on."""
        self._owner: Key | None = None
        """Whose kernels run between hooks."""
        self._entered: list[_Passage] = []
        """Forward visits that have begun, the innermost last."""
        self._open: dict[str, tuple[_Passage, Visit]] = {}
        """Backward visits that have begun, by name of the module."""
        self._handles = [handle for module, hooked in modules.items() for handle in self._attach(module, hooked)]
        for parameter in parameters:
            if parameter.trained:
                self._handles.append(
                    parameter.parameter.register_post_accumulate_grad_hook(self._gradient_hook(parameter))
                )

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int, micro: int) -> None:
        """A micro-batch begins."""
        self.step, self.micro = step, micro
        self._position = 0
        self._in_backward = False
        self._pause()
        self._owner = None
        self._entered.clear()
        self._open.clear()

    def begin_backward(self) -> None:
        """Its loss is there."""
        self._pause()
        self._in_backward = True
        self._sharding.start_of_backward(self._moment("backward", self._layer))

    def end_backward(self) -> None:
        """Its backward is over: visits that no gradient of an input has ended, end now."""
        self._pause()
        self._leave_abandoned()
        for _, visit in list(self._open.values()):
            self._sharding.after_backward(self._moment("backward", visit.layer), visit)
        self._open.clear()
        self._owner = None
        self._sharding.end_of_backward(self._moment("backward", -1))

    # ------------------------------------------------------------------ modules

    def asked(self, parameter: ShardedParameter) -> None:
        """A module asks for a parameter that is not here: another module's, which becomes one of its own too."""
        if not self._entered:
            return
        hooked, visit = self._entered[-1]
        if parameter not in hooked.parameters:
            hooked.parameters += (parameter,)
        self._pause()
        with _outside_inference():
            self._sharding.external_parameter(self._moment(visit.phase, hooked.layer), visit, parameter)
        self._resume()

    def _attach(self, module: nn.Module, hooked: HookedModule) -> Iterator[Any]:
        def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return self._before_forward(hooked, (arguments, named))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            return self._after_forward(hooked, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _before_forward(self, hooked: HookedModule, inputs: Any) -> Any:
        self._pause()
        phase: Phase = "recompute" if self._in_backward else "forward"
        passage = _Passage(hooked, self._visit(phase, hooked))
        at = self._moment(phase, hooked.layer)
        with self._recorder.host(at.key(f"{hooked.name}:call"), "module_call"):
            if torch.is_grad_enabled() and hooked.has_backward:
                inputs = _without_leaves(inputs)
                self._end_visit_behind(passage, inputs)
        self._entered.append(passage)
        with _outside_inference():
            self._sharding.before_forward(at, passage.visit)
        if hooked.computes_forward:
            self._owner = at.key(hooked.name)
        self._resume()
        return inputs

    def _after_forward(self, hooked: HookedModule, output: Any) -> Any:
        self._pause()
        # An exception that the model itself has caught has left modules without a word.
        while self._entered[-1].hooked is not hooked:
            self._leave()
        output = _without_leaves(output)
        passage = self._leave()
        if torch.is_grad_enabled() and hooked.has_backward:
            self._begin_visit_before(passage, output)
        self._resume()
        return output

    def _leave(self) -> _Passage:
        passage = self._entered.pop()
        visit = passage.visit
        with _outside_inference():
            self._sharding.after_forward(self._moment(visit.phase, visit.layer), visit)
        return passage

    def _leave_abandoned(self) -> None:
        """Non-reentrant checkpointing ends a recomputation with an exception once it has all that it needs."""
        while self._in_backward and self._entered:
            self._leave()

    def _begin_visit_before(self, passage: _Passage, output: Any) -> None:
        """The first gradient of an output begins the backward visit."""
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._before_backward(passage)

        for tensor in _distinct(output):
            _actions(tensor).append(begin)

    def _end_visit_behind(self, passage: _Passage, inputs: Any) -> None:
        """The gradients of all inputs end it."""
        tensors = _distinct(inputs)
        num_awaited = len(tensors)

        def end() -> None:
            nonlocal num_awaited
            num_awaited -= 1
            if not num_awaited:
                self._after_backward(passage)

        for tensor in tensors:
            _actions(tensor).append(end)

    def _before_backward(self, passage: _Passage) -> None:
        self._pause()
        self._leave_abandoned()
        hooked = passage.hooked
        visit = self._visit("backward", hooked)
        at = self._moment("backward", hooked.layer)
        if hooked.name in self._open:
            # Called twice: the later call's backward is over, as this one's begins.
            self._sharding.after_backward(at, self._open.pop(hooked.name)[1])
        self._open[hooked.name] = (passage, visit)
        self._sharding.before_backward(at, visit)
        if hooked.computes_backward:
            self._owner = at.key(hooked.name)
        self._resume()

    def _after_backward(self, passage: _Passage) -> None:
        begun, visit = self._open.get(passage.hooked.name, (None, None))
        if visit is None or begun is not passage:
            return
        self._pause()
        self._leave_abandoned()
        del self._open[passage.hooked.name]
        self._sharding.after_backward(self._moment("backward", visit.layer), visit)
        self._resume()

    def _visit(self, phase: Phase, hooked: HookedModule) -> Visit:
        visit = Visit(self._position, phase, hooked.layer, hooked)
        self._position += 1
        self._layer = hooked.layer
        return visit

    # ------------------------------------------------------------------ gradients

    def _gradient_hook(self, parameter: ShardedParameter) -> Any:
        def ready(_: Tensor) -> None:
            self._pause()
            self._leave_abandoned()
            with torch.no_grad():
                self._sharding.gradient_ready(self._moment("backward", self._layer), parameter)
            self._resume()

        return ready

    # ------------------------------------------------------------------ time

    def _moment(self, phase: Phase, layer: int) -> Moment:
        return Moment(self.step, self.micro, phase, layer)

    def _pause(self) -> None:
        self._device.end_compute()

    def _resume(self) -> None:
        if self._owner is not None:
            self._device.begin_compute(self._owner)


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Parameters that are gathered in torch.inference_mode may be trained with later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    else:
        with torch.no_grad():
            yield


def _actions(tensor: Tensor) -> list[Callable[[], None]]:
    """What is to be done once the gradient of a tensor is there: what was added last comes first.

    Modules that hand on what they are given (a dropout of nothing, a container what its last child returns) share one
    tensor, and backward passes them in reverse.
    """
    version: int
    actions: list[Callable[[], None]]
    version, actions = vars(tensor).get(_ACTIONS, (-1, []))
    if version != tensor._version:  # noqa: SLF001  an operation in place has made another value of it
        actions = []
        setattr(tensor, _ACTIONS, (tensor._version, actions))  # noqa: SLF001

        def act(_: Tensor) -> None:
            for action in reversed(actions):
                action()

        tensor.register_hook(act)
    return actions


def _distinct(nested: Any) -> list[Tensor]:
    """Tensors with a gradient, each once."""
    return list({id(tensor): tensor for tensor in _tensors(nested) if tensor.requires_grad}.values())


def _tensors(nested: Any) -> Iterator[Tensor]:
    """All tensors among arguments or outputs, within lists, tuples, dictionaries and dataclasses too."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from _tensors(each)
    elif isinstance(nested, dict):
        for each in nested.values():
            yield from _tensors(each)
    elif is_dataclass(nested) and not isinstance(nested, type):
        for each in fields(nested):
            yield from _tensors(getattr(nested, each.name))


def _without_leaves(nested: Any) -> Any:
    """The same with views in place of leaves.

    Autograd completes a leaf's gradient before all else that could run, be it of the module that is to be left behind
    it; the view's is complete when the module's backward is over. And a parameter that a module returns is a parameter
    that others need when it has been released.
    """
    if isinstance(nested, Tensor):
        is_parameter = nested.requires_grad or isinstance(nested, nn.Parameter)
        return nested.view_as(nested) if nested.is_leaf and is_parameter else nested
    if isinstance(nested, dict):
        views = {key: _without_leaves(each) for key, each in nested.items()}
        return nested if all(views[key] is each for key, each in nested.items()) else type(nested)(views)
    if isinstance(nested, list | tuple):
        parts = [_without_leaves(each) for each in nested]
        if all(part is each for part, each in zip(parts, nested, strict=True)):
            return nested
        return type(nested)(*parts) if hasattr(nested, "_fields") else type(nested)(parts)
    return nested
