"""Tokens to train on: made up, the same for every engine and number of ranks, with something in them to learn.

A sample counts upwards through the vocabulary from a start that is rather small than large, and jumps to a new start
at one of ten tokens. Frequent tokens are learnt within a few steps, the successor of a token after them.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from zsim.spec import Spec

JUMPS: Final = 0.1
"""Share of tokens at which a new run starts."""
MASKED: Final = 0.15
"""Share of tokens hidden from a model that is not causal (Devlin et al. 2019)."""
MASK_TOKEN: Final = 0


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What decides the samples."""

    seed: int
    vocab: int
    seq_len: int
    micro_batch: int
    causal: bool
    """Whether a label is the token that follows; the token itself otherwise."""

    @classmethod
    def of(cls, spec: Spec, *, seed: int = 0) -> Self:
        """Those of an experiment."""
        return cls(seed, spec.model.vocab, spec.train.seq_len, spec.train.micro_batch, causal=spec.model.causal)


def batch(settings: DataSettings, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one rank's micro-batch, int64 [b, s].

    A sample is decided by seed, step, micro-batch and its index in the micro-batches of all ranks: N ranks of b samples
    see together what one process sees with N·b.
    """
    first = rank * settings.micro_batch
    samples = [_sample(settings, step, micro, first + index) for index in range(settings.micro_batch)]
    tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))
    return tokens, labels


def _sample(settings: DataSettings, step: int, micro: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng((settings.seed, step, micro, index))
    length = settings.seq_len + 1
    place = np.arange(length)
    jumps = random.random(length) < JUMPS
    jumps[0] = True
    starts = (settings.vocab * random.random(length) ** 3).astype(np.int64)
    run = np.maximum.accumulate(np.where(jumps, place, 0))
    sequence = (starts[run] + place - run) % settings.vocab
    if settings.causal:
        return sequence[:-1], sequence[1:]
    labels = sequence[:-1]
    return np.where(random.random(settings.seq_len) < MASKED, MASK_TOKEN, labels), labels
