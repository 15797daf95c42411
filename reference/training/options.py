"""What a rank is asked for on its command line."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from zsim.units import InputError
from zsim.writing.output import check_folder, check_writable

RESULT = "result.json"
"""Within the output folder."""
STEPS = 10
WARMUP = 2
TIMEOUT_S = 600.0
CHECKPOINT_EVERY = 100
LARGEST_SEED = 2**63 - 1
"""Of torch.manual_seed."""
LONGEST_TIMEOUT_S = 1e6
"""Some eleven days; gloo counts milliseconds in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of one run."""

    experiment: Path
    overrides: tuple[str, ...] = ()
    engine: str = "reference"
    steps: int = STEPS
    """That are measured; the last of them are recorded too."""
    warmup: int = WARMUP
    """Steps before them."""
    seed: int = 0
    """Of weights and data."""
    output: Path = Path("out")
    trace: Path | None = None
    """A Chrome trace of all ranks."""
    profile: Path | None = None
    """Folder for what torch's profiler sees of one more step."""
    checkpoint: Path | None = None
    """Folder of checkpoints."""
    checkpoint_every: int = CHECKPOINT_EVERY
    resume: bool = False
    timeout_s: float = TIMEOUT_S


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As whatever else the user gets wrong."""
        raise InputError(f"{self.prog}: {message}")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads a command line, by default this process's.

    Raises:
        InputError: a ValueError: an option is unknown or has no such value.

    """
    parser = _Parser(prog="reference.train", description="Trains an experiment as one of its ranks.")
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="an experiment, a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a.b=c of the file")
    parser.add_argument("--engine", default="reference", help="whose sharding trains")
    parser.add_argument(
        "--steps",
        type=_count(1),
        default=STEPS,
        help="steps that are measured; the last three are recorded, the others timed",
    )
    parser.add_argument("--warmup", type=_count(0), default=WARMUP, help="steps before them")
    parser.add_argument("--seed", type=_count(0, LARGEST_SEED), default=0, help="of weights and data")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="for the result and traces")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a Chrome trace of all ranks; .json or .json.gz")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="torch's profiler over one more step of each rank")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save the training state there")
    parser.add_argument("--checkpoint-every", type=_count(1), default=CHECKPOINT_EVERY, help="steps between two")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--timeout", type=_timeout, default=TIMEOUT_S, dest="timeout_s", help="seconds; of any wait")
    given = vars(parser.parse_args(arguments))
    options = Options(overrides=tuple(given.pop("set")), **given)
    if options.resume and options.checkpoint is None:
        raise InputError("--resume: no folder to resume from is given; allowed: with --checkpoint DIR")
    if options.checkpoint and options.engine != "reference":
        raise InputError(f"--checkpoint: given with --engine {options.engine}; allowed: with --engine reference")
    return options


def check_outputs(options: Options) -> None:
    """Proves, before the work begins, that everything can be written that is written at its end.

    Raises:
        InputError: a ValueError: something cannot.

    """
    check_folder(options.output, "--output")
    if options.profile:
        check_folder(options.profile, "--profile")
    # One that is to be resumed from and does not exist is said as that, and not made.
    if options.checkpoint and (options.checkpoint.exists() or not options.resume):
        check_folder(options.checkpoint, "--checkpoint")
    if options.trace:
        check_writable(options.trace, "--trace")


def _count(least: int, most: float = math.inf) -> "type[int]":
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"given {text}; allowed: {allowed}")
        return value

    number.__name__ = "number"
    return number  # type: ignore[return-value]


def _timeout(text: str) -> float:
    value = float(text)
    if not 1 <= value <= LONGEST_TIMEOUT_S:  # nor for what is no number
        raise argparse.ArgumentTypeError(f"given {text}; allowed: 1 to {LONGEST_TIMEOUT_S:g}")
    return value


_timeout.__name__ = "number of seconds"
