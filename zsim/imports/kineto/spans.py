"""A profile of torch's profiler as a `Trace`, so that every figure of a simulated step is one of a measured step too.

    trace = measured_trace(read_ranks(paths), spec)

A kernel is a span of its own, under the operator that launched it and the module around that. The compute lane is the
stream on which kernels other than NCCL's run longest. Left out: what the host does beside launching, waiting for the
device and asking it for memory; it is what remains of a step.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from zsim.imports.kineto.collectives import element_bytes
from zsim.imports.kineto.modules import ModulePaths, Path, block_class, layer, plain
from zsim.imports.kineto.nesting import launches
from zsim.imports.kineto.passes import places
from zsim.imports.kineto.records import Activity, CollectiveCall, HostEvent, Profile
from zsim.imports.kineto.rendezvous import transfer_times_s
from zsim.imports.kineto.steps import Steps, steps_of
from zsim.ops import COMPUTE, HOST, Key
from zsim.spec import Spec
from zsim.trace import DEVICE_FREE, DEVICE_MALLOC, MemorySample, Span, Trace
from zsim.units import InputError

_SYNC: Final = re.compile(r"(?:cuda|hip)(Device|Stream|Event)Synchronize")
_COPIES: Final = {
    "fsdp::all_gather_copy_in": ":all_gather.flatten",
    "fsdp::split_with_sizes_copy": ":all_gather.unflatten",
    "fsdp::chunk_cat": ":reduce.flatten",
}
"""Operators of FSDP2 around its collectives (torch, _fully_shard/_fsdp_collectives.py) -> what keys call them."""
_ALLOCATOR: Final = {"Malloc": DEVICE_MALLOC, "Free": DEVICE_FREE}
_DEVICE_MEMORY: Final = re.compile(r"(?:cuda|hip)(Malloc|Free)(?:Async)?")


def measured_trace(profiles: Sequence[Profile], spec: Spec) -> Trace:
    """What the ranks of some profiles did.

    Args:
        profiles: one or more ranks of one run.
        spec: the experiment that the run is held to be.

    Raises:
        InputError: a ValueError: no kernels, or none within a step.

    """
    transfers = transfer_times_s(profiles)
    spans: list[Span] = []
    memory: list[MemorySample] = []
    for profile, seconds in zip(profiles, transfers, strict=True):
        check_kernels(profile)
        own = list(RankSpans(profile, spec.model.num_blocks, seconds).spans())
        if not any(span.lane != HOST for span in own):
            raise InputError(f"{profile.name}: no kernel within a step; allowed: a trace of at least one whole step")
        spans += own
        memory += _memory(profile)
    return Trace(
        origin="measured",
        spec=spec,
        versions={},
        num_ranks=max(len(profiles), *(profile.world_size for profile in profiles)),
        spans=sorted(spans, key=lambda span: (span.rank, span.start_s)),
        memory=memory,
    )


def check_kernels(profile: Profile) -> None:
    """Refuses a profile of the CPU alone.

    Raises:
        InputError: a ValueError: no kernels.

    """
    if not any(activity.kind == "kernel" for activity in profile.activities):
        raise InputError(
            f"{profile.name}: no kernels among {len(profile.host):,} events of the host; allowed: a trace with"
            " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] of a run on GPUs"
        )


class RankSpans:
    """Spans of one rank.

    Args:
        profile: of the rank.
        num_blocks: transformer blocks of the model, by which layers are told; None where it is not known.
        transfers_s: seconds of collectives from their last rank's arrival, by index in `profile.activities`.

    """

    def __init__(self, profile: Profile, num_blocks: int | None, transfers_s: Mapping[int, float]) -> None:
        self.launches = launches(profile)
        self.steps: Steps = steps_of(profile)
        self.places = places(profile, self.steps, self.launches)
        self.modules = ModulePaths(profile)
        self.profile = profile
        self.transfers_s = transfers_s
        self._lanes = lane_names(profile.activities)
        self._block = block_class(profile, num_blocks)

    def spans(self) -> Iterator[Span]:
        """Of device and host, in no order."""
        for step, (start_s, end_s) in enumerate(self.steps.windows):
            key = Key(step, 0, "step", -1, "host")
            yield Span(self.profile.rank, HOST, key, "host", start_s, end_s, 0, start_s)
        calls: dict[int, Key] = {}
        for index, activity in enumerate(self.profile.activities):
            launch, place = self.launches[index], self.places[index]
            if place.step < 0:
                continue
            chain = self.profile.enclosing(launch)
            path = self.modules.of(chain)
            key = Key(place.step, place.micro, place.phase, layer(path, self._block), _what(activity, path, chain))
            calls[launch] = key
            yield self._activity(index, activity, key)
        yield from self._host(calls)

    def _activity(self, index: int, activity: Activity, key: Key) -> Span:
        launch = self.launches[index]
        start_s, nbytes, size, kind = activity.start_s, activity.nbytes, 0, "compute"
        if activity.collective is not None:
            call = collective_of(activity, self.profile.enclosing(launch), self.profile.world_size)
            # Others, such as all-to-all, are communication of no kind that has a name here.
            kind = "broadcast" if call.kind == "other" else call.kind
            nbytes, size = call.nbytes, call.element_bytes
            start_s = max(start_s, activity.end_s - self.transfers_s[index])
        elif activity.kind != "kernel":
            # Read and written.
            kind, nbytes = "copy", 2 * nbytes
        elif key.what in _COPIES.values():
            kind = "copy"
        issued_s = self.profile.host[launch].end_s if launch >= 0 else start_s
        lane = self._lanes[activity.stream]
        return Span(self.profile.rank, lane, key, kind, start_s, activity.end_s, nbytes, issued_s, element_bytes=size)

    def _host(self, calls: dict[int, Key]) -> Iterator[Span]:
        """Launches, waits for the device, and calls by which the allocator takes and returns memory."""
        for index, event in enumerate(self.profile.host):
            if event.kind != "call" or (step := self.steps.index(event.start_s)) < 0:
                continue
            kind, note = _of_call(event.name)
            if index in calls:
                kind, note = "launch", ""
            if kind:
                key = calls.get(index, Key(step, 0, "step", -1, event.name))
                yield Span(self.profile.rank, HOST, key, kind, event.start_s, event.end_s, 0, event.start_s, note=note)


def lane_names(activities: Sequence[Activity]) -> dict[int, str]:
    """Names of streams: compute, those of NCCL, and others, each with its number."""
    computing: dict[int, float] = {}
    communicating: dict[int, float] = {}
    for activity in activities:
        times = communicating if activity.collective is not None else computing
        times[activity.stream] = times.get(activity.stream, 0.0) + activity.duration_s
    streams = dict.fromkeys(activity.stream for activity in activities)
    names = {
        stream: f"{'nccl' if communicating.get(stream, 0.0) > computing.get(stream, 0.0) else 'stream'} {stream}"
        for stream in streams
    }
    if computing:
        names[max(computing, key=lambda stream: computing[stream])] = COMPUTE
    return names


def collective_of(activity: Activity, chain: Sequence[HostEvent], world_size: int) -> CollectiveCall:
    """What a kernel of NCCL does: by its own arguments, else by those of the call around its launch."""
    call = activity.collective
    assert call is not None
    for event in chain:
        if event.collective is None:
            continue
        theirs = event.collective
        call = call._replace(
            kind=theirs.kind if call.kind == "other" else call.kind,
            num_in=call.num_in or theirs.num_in or _numel(event),
            num_out=call.num_out or theirs.num_out,
            element_bytes=call.element_bytes or theirs.element_bytes or _element_bytes(event),
            group_size=call.group_size or theirs.group_size,
        )
    return call._replace(group_size=call.group_size or world_size)


def _numel(event: HostEvent) -> int:
    """Of the only tensor that a call before PyTorch 2.1 states."""
    shapes = _tensors(event)
    if len(shapes) != 1:
        return 0
    number = 1
    for size in shapes[0]:
        number *= size
    return number


def _element_bytes(event: HostEvent) -> int:
    types = event.arguments.types if event.arguments else ()
    return element_bytes(types[0]) if types else 0


def _tensors(event: HostEvent) -> list[Any]:
    return [shape for shape in (event.arguments.shapes if event.arguments else ()) if shape]


def _what(activity: Activity, path: Path, chain: Sequence[HostEvent]) -> str:
    """Module and operator, or the collective behind a colon, as keys have it."""
    module = plain(path[-1]) if path else ""
    if activity.collective is not None:
        return f"{module}:{activity.collective.kind}"
    if copies := [_COPIES[event.name] for event in chain if event.name in _COPIES]:
        return copies[0]
    operator = next((event.name for event in chain if event.kind == "operator"), "")
    name = operator.removeprefix("aten::") or _function(activity.name)
    return ".".join(part for part in (module, name) if part).replace(":", "_") or activity.kind


def _function(kernel: str) -> str:
    """Name of a kernel's function, without namespaces, templates and parameters."""
    plainer = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plainer)[0].rpartition("::")[2].strip()


def _of_call(name: str) -> tuple[str, str]:
    """Kind and note of the span of a runtime call that launches nothing; no kind for what is left out."""
    if found := _SYNC.fullmatch(name):
        return "sync", found[1].lower()
    if found := _DEVICE_MEMORY.fullmatch(name):
        return "host", _ALLOCATOR[found[1]]
    return "", ""


def _memory(profile: Profile) -> Iterator[MemorySample]:
    """The allocator's totals after each change; what a buffer is for nobody has recorded."""
    for event in profile.memory:
        if event.is_device:
            yield MemorySample(
                profile.rank, event.time_s, "unknown", event.nbytes, event.allocated_bytes, event.reserved_bytes
            )
