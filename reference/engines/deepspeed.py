"""DeepSpeed itself, over NCCL or, on CPUs, over gloo; stages 0 to 3 of the `deepspeed` section as resolved."""

import importlib.util
import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from reference.device.recorder import Recorder
from reference.engines import peer
from reference.engines.engine import Outcome
from reference.sharding import optimizer
from reference.sharding.settings import Settings, from_spec
from reference.training import world
from zsim.spec import Spec, ZeroSpec
from zsim.units import InputError

SHARED_MEMORY = "deepspeed_shm_comm"
NEVER = 10**9
"""Steps between two lines of its log."""
_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys that DeepSpeed spells with `stage3_` in front."""
_ALL_STAGES = (
    "stage",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "round_robin_gradients",
    "zero_hpz_partition_size",
)


class DeepSpeed:
    """A DeepSpeedEngine with torch's optimizer."""

    name = "deepspeed"

    def __init__(self, spec: Spec, settings: Settings, *, seed: int) -> None:
        _check(spec)
        self._settings = settings
        self._device = world.device(spec)
        deepspeed = _imported(self._device.type)
        self._model = peer.model_of(spec, settings, seed=seed, reentrant=True)
        self._named = self._model.parameters_by_name()
        self._shapes = {name: parameter.shape for name, parameter in self._named.items()}
        # Stage 3 puts functions of its own in the place of torch's.
        self._linear = functional.linear
        self._engine, *_ = deepspeed.initialize(
            model=self._model,
            optimizer=optimizer.make(settings.optimizer, peer.trained(self._model)),
            config=config_of(spec, settings),
            dist_init_required=False,
        )

    def step(self, batches: Sequence[peer.Batch]) -> Outcome:
        """One optimizer step over the micro-batches of this rank."""
        losses: list[Tensor] = []
        passes = peer.Passes()
        for tokens, labels in batches:
            loss = self._engine(tokens.to(self._device), labels.to(self._device))
            losses.append(loss.detach())
            passes.end("forward")
            self._engine.backward(loss)
            passes.end("backward")
            self._engine.step()
            passes.end("step")
        norm = self._engine.get_global_grad_norm()
        return peer.outcome(
            losses,
            passes,
            skipped=not self._engine.was_step_applied(),
            gradient_norm=None if norm is None else float(norm),
        )

    def payload_bytes(self) -> int:
        """0: DeepSpeed counts calls, not what a rank sends."""
        return 0

    def parameters(self) -> dict[str, Tensor]:
        """Whole, fp32, by the simulator's names; all ranks gather them."""
        master_of = import_module("deepspeed.utils").safe_get_full_fp32_param
        whole = {}
        for name, parameter in self._named.items():
            master = master_of(parameter) if self._settings.zero.stage else None
            whole[name] = (parameter if master is None else master).detach().float().view(self._shapes[name])
        return whole

    def close(self) -> None:
        """Takes DeepSpeed's hooks away and gives torch its functions back."""
        self._engine.destroy()
        functional.linear = self._linear
        # It keeps process groups in its modules, which would outlive the run's.
        import_module("deepspeed.utils.groups")._release_process_group_references()  # noqa: SLF001  no public name


def create(spec: Spec, *, seed: int, recorder: Recorder, timeout_s: float) -> DeepSpeed:
    """See `engines.create`."""
    del recorder  # whose keys are those of the reference engine's operations
    return DeepSpeed(spec, from_spec(spec, timeout_s=timeout_s), seed=seed)


def config_of(spec: Spec, settings: Settings) -> dict[str, Any]:
    """The configuration that DeepSpeed is given: sizes and switches as the experiment has been resolved."""
    zero = spec.zero
    section: dict[str, Any] = {"stage": zero.stage}
    if zero.stage:
        section |= {name: getattr(zero, name) for name in _ALL_STAGES}
        section["use_multi_rank_bucket_allreduce"] = spec.runtime.optimisations.multi_rank_all_reduce
    if zero.stage == 3:
        section |= {f"stage3_{name}": getattr(zero, name) for name in _STAGE_3}
    return {
        "train_micro_batch_size_per_gpu": spec.train.micro_batch,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "gradient_clipping": settings.gradient_clipping,
        "bf16": {"enabled": settings.dtype == torch.bfloat16},
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
    }


def _check(spec: Spec) -> None:
    zero: ZeroSpec = spec.zero
    if spec.runtime.framework not in {"deepspeed", "reference"}:
        raise InputError(
            f"engine deepspeed: given runtime {spec.runtime.name}; allowed: one with a `deepspeed` section"
        )
    if zero.is_mics:
        raise InputError("engine deepspeed: given mics_shard_size; DeepSpeed 0.19 has no MiCS, allowed: -1")
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError("engine deepspeed: deepspeed is not installed; pip install 'zsim[peers]' installs it")


def _imported(accelerator: str) -> Any:
    """The package, told which accelerator there is and where it stands among the ranks."""
    rank = dist.get_rank()
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    # Read by name though the process group stands already.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
    deepspeed = import_module("deepspeed")
    # Else it compiles, for minutes, collectives through the shared memory of one machine, whose links are to be used.
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    # It calls collectives by names that torch 2.13 is about to change, and would be told so at each call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
