"""The optimizer step, shared by the ZeRO stages: overflow, gradient norm, Adam by sub-groups."""

from collections.abc import Callable, Generator, Iterator
from itertools import accumulate

from zsim.ops import COMPUTE, Alloc, Compute, Copy, Free, HostTask, Op, Sync
from zsim.strategies.adam import AdamWork, adam, sgd
from zsim.strategies.communicators import WORLD
from zsim.strategies.loading import FP32_BYTES
from zsim.strategies.sharding import Moment, Sharding, padded, partition_order
from zsim.strategies.states import num_moments

Release = Callable[[Moment, int], Iterator[Op]]
"""Frees the gradients of a sub-group."""


def keep(_at: Moment, _sub_group: int) -> Iterator[Op]:
    """Their memory is kept for the next step."""
    yield from ()


_FP64_BYTES = 8
_NORM_BYTES = 18
"""Per element: cast to double (read 2, write 8), read 8 for the norm."""

_AROUND_ADAM_BYTES, _AROUND_ADAM_KERNELS = 24, 7
"""Per element: flatten 4, cast to fp32 6, unscale 8, cast back 6."""
_CLIP_BYTES, _CAST_BYTES = 8, 12
"""Of the reference engine, per element: scaled in place where norms are clipped; with 16 bits cast to fp32 and back."""


class OptimizerStep:
    """Writes the step of one rank on its partition."""

    def __init__(self, sharding: Sharding, communicator: str, group: str = WORLD) -> None:
        self.sharding = sharding
        self.spec = sharding.spec
        self.switches = sharding.spec.runtime.optimisations
        self.communicator = communicator
        self.group = group
        self.is_reference = sharding.spec.runtime.framework == "reference"

    def update(self, at: Moment, release: Release = keep) -> Iterator[Op]:
        """Overflow check, gradient norm, then each sub-group of the partition.

        Args:
            at: moment of the step.
            release: what frees the gradients of a sub-group, by its number, once they are cast.

        """
        sub_groups = self._sub_groups()
        yield from self._overflow(at)
        for i, (numel, num_tensors) in enumerate(sub_groups):
            yield from self._norm(at, i, numel, num_tensors)
        for i, (numel, num_tensors) in enumerate(sub_groups):
            what = f"sub_group.{i}"
            work = self._work(self._masters(numel))
            yield HostTask(at.key(f"{what}:update"), "optimizer_tensor", num_tensors)
            held = yield from self._prepare(at, what, numel, work)
            yield from release(at, i)
            around_bytes, around_kernels = self._around
            nbytes, num_kernels = around_bytes * numel + work.nbytes, around_kernels + work.num_kernels
            if not self.is_reference:
                held += yield from self._temporaries(at, what, work)
            yield Compute(at.key(f"{what}:update"), (), nbytes, num_kernels)
            for buffer in held:
                yield Free(at.key(f"{what}:fp32"), buffer)

    def _prepare(self, at: Moment, what: str, numel: int, work: AdamWork) -> Generator[Op, None, list[str]]:
        """The gradient in fp32: of a partition flattened, then cast; of whole parameters cast, then flattened.

        DeepSpeed's `_prepare_fp32_grad_for_sub_group`, stages 1 and 2 in `step`, stage 0 in runtime/fp16/
        fused_optimizer.py. The reference engine counts what Adam holds with it.
        """
        e, fp32, key = self.sharding.element_bytes, f"{what}.{at.step}", at.key(f"{what}:fp32")
        if self.is_reference:
            if held_bytes := FP32_BYTES * numel * self._casts + sum(work.temporaries):
                yield Alloc(key, fp32, held_bytes, "temporary")
            return [fp32] if held_bytes else []
        if not self._casts:
            return []
        if self.spec.zero.stage:
            flat = [(f"{what}.flat.{at.step}", e * numel)] if e < FP32_BYTES else []
        else:
            flat = [
                (f"{p.name}.{what}.{at.step}", FP32_BYTES * p.numel) for p in self.sharding.graph.trained_parameters
            ]
        for buffer, nbytes in flat:
            yield Alloc(key, buffer, nbytes, "temporary", by_operator=True)
        if self.spec.runtime.framework == "ddp":
            return [buffer for buffer, _ in flat]
        yield Alloc(key, fp32, FP32_BYTES * numel, "temporary", by_operator=True)
        for buffer, _ in flat:
            yield Free(key, buffer)
        return [fp32]

    @staticmethod
    def _temporaries(at: Moment, what: str, work: AdamWork) -> Generator[Op, None, list[str]]:
        """What the optimizer itself holds."""
        held = [f"{what}.adam.{i}.{at.step}" for i in range(len(work.temporaries))]
        for buffer, nbytes in zip(held, work.temporaries, strict=True):
            yield Alloc(at.key(f"{what}:fp32"), buffer, nbytes, "temporary", by_operator=True)
        return held

    @property
    def _norm_bytes(self) -> int:
        """Per element; the reference engine reads fp32 as it is and casts 16 bits to fp32."""
        if not self.is_reference:
            return _NORM_BYTES
        return 4 if self.sharding.element_bytes == 4 else 2 + 4 + 4

    def _work(self, numels: list[int]) -> AdamWork:
        if self.spec.optimizer.kind == "SGD":
            return sgd(numels, has_momentum=num_moments(self.sharding) > 0)
        return adam(self.spec.train.optimizer_implementation, numels)

    @property
    def _casts(self) -> bool:
        """Whether the gradient is copied: to fp32, or by DeepSpeed's stages into a flat one in any case."""
        flattens = self.spec.zero.stage > 0 and not self.is_reference
        return flattens or self.sharding.element_bytes < FP32_BYTES

    @property
    def _around(self) -> tuple[int, int]:
        """Bytes of an element and kernels around the update itself."""
        if not self.is_reference:
            return _AROUND_ADAM_BYTES, _AROUND_ADAM_KERNELS
        clips = self.spec.optimizer.gradient_clipping > 0
        return _CAST_BYTES * self._casts + _CLIP_BYTES * clips, 2 * self._casts + clips

    def _masters(self, numel: int) -> list[int]:
        """Elements of the tensors that Adam updates: partitions are flat, whole parameters are not."""
        if self.spec.zero.stage:
            return [numel]
        return [parameter.numel for parameter in self.sharding.graph.trained_parameters]

    def _sub_groups(self) -> list[tuple[int, int]]:
        """(elements, tensors) of each sub-group of this rank's partition."""
        num_ranks = self.sharding.num_ranks if self.spec.zero.stage else 1
        sizes = [padded(p.numel, num_ranks) // num_ranks for p in self.sharding.graph.trained_parameters]
        if self.spec.zero.stage < 3:
            flat = padded(sum(p.numel for p in self.sharding.graph.trained_parameters), 2 * num_ranks) // num_ranks
            is_flat = self.spec.zero.stage > 0 and not self.is_reference
            return [(flat if is_flat else sum(sizes), len(sizes))]
        groups: list[tuple[int, int]] = []
        numel = num_tensors = 0
        for size in sizes:
            numel, num_tensors = numel + size, num_tensors + 1
            if numel >= self.spec.zero.sub_group_size:
                groups.append((numel, num_tensors))
                numel = num_tensors = 0
        return [*groups, (numel, num_tensors)] if num_tensors else groups

    def _tensors(self) -> list[tuple[str, int]]:
        """Gradients this rank looks at: its slice of each (stage 3, reference), or the tensors of its partition."""
        num_ranks = self.sharding.num_ranks
        parameters = self.sharding.graph.trained_parameters
        if self.spec.zero.stage == 3 or (self.is_reference and self.spec.zero.stage):
            return [(p.name, padded(p.numel, num_ranks) // num_ranks) for p in parameters]
        if self.spec.zero.stage == 0:
            return [(p.name, p.numel) for p in parameters]
        parameters = partition_order(parameters, num_ranks, round_robin=self.spec.zero.round_robin_gradients)
        share = sum(p.numel for p in parameters) / num_ranks
        ends = accumulate(p.numel for p in parameters)
        return [(p.name, p.numel) for p, end in zip(parameters, ends, strict=True) if end - p.numel < share]

    def _overflow(self, at: Moment) -> Iterator[Op]:
        """A flag of one byte, reduced over all ranks; found per tensor on the host, or fused on the device."""
        e = self.sharding.element_bytes
        tensors = self._tensors()
        if self.spec.train.precision != "fp16" and self.spec.runtime.framework == "ddp":
            return
        if self.switches.fused_gradient_norm and not self._is_serial:
            numel = sum(n for _, n in tensors)
            # The reference engine looks for it as gradients arrive in all stages that reduce them to slices.
            in_step = self.spec.zero.stage == 0 if self.is_reference else self.spec.zero.stage < 3
            if self._checked_in_step and self.spec.zero.stage == 3 and not self.is_reference:
                # isinf() and isnan() over the whole flat partition: its magnitude, and a byte an element.
                yield from self._transient(at, "overflow:check", (e + 1) * numel, lane=self._reducing_lane)
            if self._checked_in_step or in_step:
                yield Compute(at.key("overflow:check"), (), 2 * e * numel, 6)
            if not self._checked_in_step and not (self.is_reference and in_step):
                yield from self._read_scalar(at, "overflow:flag")
        else:
            for name, numel in tensors:
                # Cast to fp32, then summed.
                yield from self._transient(at, f"{name}:overflow", FP32_BYTES * numel)
                yield Compute(at.key(f"{name}:overflow"), (), (e + 8) * numel, 2)
                yield from self._read_scalar(at, f"{name}:overflow")
        if self.spec.runtime.framework != "ddp":
            yield from self._all_reduce_scalar(at, "overflow:all_reduce", element_bytes=1)
        yield from self._read_scalar(at, "overflow:read")

    def _norm(self, at: Moment, i: int, numel: int, num_tensors: int) -> Iterator[Op]:
        """Norm of one sub-group's gradients, summed over ranks."""
        what = f"sub_group.{i}"
        if self._is_serial:
            # Of the flat gradient in fp32 (`get_flattened_grad_norm`); each rank holds all of it.
            yield Compute(at.key(f"{what}:norm"), (), FP32_BYTES * numel, 2)
            yield from self._read_scalar(at, f"{what}:norm_read")
            return
        if self.switches.fused_gradient_norm:
            yield HostTask(at.key(f"{what}:norm"), "optimizer_tensor", num_tensors)
            if not self.is_reference:
                # One after the other, each cast to double.
                largest = max(tensor_numel for _, tensor_numel in self._tensors())
                yield from self._transient(at, f"{what}:norm", _FP64_BYTES * largest)
            yield Compute(at.key(f"{what}:norm"), (), self._norm_bytes * numel, 2 * num_tensors + 2)
        elif i == 0:
            for name, tensor_numel in self._tensors():
                yield from self._transient(at, f"{name}:norm", _FP64_BYTES * tensor_numel)
                yield Compute(at.key(f"{name}:norm"), (), _NORM_BYTES * tensor_numel, 2)
                yield from self._read_scalar(at, f"{name}:norm")
        if self.spec.runtime.framework == "ddp":
            # Every rank holds the whole averaged gradient.
            return
        if not self.switches.fused_gradient_norm:
            # The sum was made on the host and goes back to the device.
            yield Copy(at.key(f"{what}:norm_to_device"), COMPUTE, 4)
        if self.spec.zero.stage or not self.is_reference:
            # The reference engine adds squares in fp64.
            element_bytes = 8 if self.is_reference else 4
            yield from self._all_reduce_scalar(at, f"{what}:norm_all_reduce", element_bytes=element_bytes)
        if not self._checked_in_step:
            yield from self._read_scalar(at, f"{what}:norm_read")

    @property
    def _is_serial(self) -> bool:
        """DeepSpeed's FP16_Optimizer: flag by flag to this day (runtime/utils.py, `has_overflow_serial`)."""
        runtime, train = self.spec.runtime, self.spec.train
        return runtime.framework == "deepspeed" and self.spec.zero.stage == 0 and train.precision == "fp16"

    @property
    def _checked_in_step(self) -> bool:
        """Since 2023 (PR #3622): no check as partitions arrive, and flag and norm stay on the device until reduced."""
        return self.switches.fused_gradient_norm and not self.switches.debug_strings

    @property
    def _reducing_lane(self) -> str:
        return "reduce" if self.spec.zero.overlap_comm else COMPUTE

    @staticmethod
    def _transient(at: Moment, what: str, nbytes: int, lane: str = COMPUTE) -> Iterator[Op]:
        """What the operators of one expression hand on to each other."""
        buffer = f"{what}.{at.step}"
        yield Alloc(at.key(what), buffer, nbytes, "temporary", lane, by_operator=True)
        yield Free(at.key(what), buffer, by_operator=True)

    @staticmethod
    def _read_scalar(at: Moment, what: str) -> Iterator[Op]:
        """.item(): the compute lane drained, the value copied to the host."""
        yield Sync(at.key(what), (COMPUTE,))
        yield HostTask(at.key(what), "item")

    def _all_reduce_scalar(self, at: Moment, what: str, *, element_bytes: int) -> Iterator[Op]:
        yield from self.sharding.collective(
            at,
            what,
            "all_reduce",
            issued_from=COMPUTE,
            communicator=self.communicator,
            group=self.group,
            num_elements=1,
            element_bytes=element_bytes,
        )
        yield from self.sharding.wait_stream(at, COMPUTE, self.communicator, what)
