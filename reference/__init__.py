"""The reference engine: trains for real, under the experiment file that the simulator reads.

`wrap` shards any `torch.nn.Module`; `python -m reference.train` and `zsim measure` train the experiment's own model.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from reference.device.recorder import Recorder
    from reference.sharding import ShardedModel
    from zsim.reading.config import Experiment
    from zsim.spec import Spec

__all__ = ["wrap"]


def wrap(
    model: "nn.Module",
    experiment: "Spec | Experiment | str | Path",
    *,
    recorder: "Recorder | None" = None,
    timeout_s: float = 60.0,
) -> "ShardedModel":
    """Shards a model as an experiment says: its ZeRO stage, optimizer and switches. All ranks call it alike.

        sharded = wrap(model, "experiment.yaml")
        for inputs, targets in batches:
            loss = sharded(inputs, targets)
            sharded.backward(loss)
            sharded.step()

    Rank 0's weights count. Parameters that are tied, frozen, used twice or never, or smaller than the number of ranks
    are all right. Uses torch.distributed's process group; where there is none, makes one from the environment that
    torchrun sets, or of this process alone.

    Args:
        model: on the device where it is to compute, in the experiment's precision.
        experiment: a resolved spec, a loaded experiment, or the path of an experiment file; its model, batch and
            cluster are not looked at, except that `train.gradient_accumulation` calls make a step.
        recorder: is told what happens; switch it on with `start`.
        timeout_s: after which a wait for other ranks is an error.

    Raises:
        InputError: a ValueError: the experiment is wrong or asks for what the engine does not have, or the model is
            in another precision.

    """
    # Without torch, parts of this package still have to load: they say in one line that it is missing.
    from reference.sharding.wrapping import wrapped  # noqa: PLC0415

    return wrapped(model, experiment, recorder=recorder, timeout_s=timeout_s)
