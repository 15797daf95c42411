"""A file with measured collectives, whichever benchmark wrote it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from zsim.imports import all_reduce_bench, collective_table, comms_logger, galvatron_bandwidth, nccl_tests
from zsim.imports.collective_measurements import CollectiveLog, Hints
from zsim.units import InputError

MAX_BYTES: Final = 64 * 2**20
"""A log with NCCL_DEBUG=INFO of a thousand ranks has some megabytes."""
_NO_HINTS: Final = Hints()
_READERS: Final[tuple[tuple[Callable[[str], bool], Callable[[str, str, Hints], CollectiveLog]], ...]] = (
    (galvatron_bandwidth.recognises, galvatron_bandwidth.read_galvatron_bandwidth),
    (collective_table.recognises, collective_table.read_collective_table),
    (comms_logger.recognises, comms_logger.read_comms_logger),
    (all_reduce_bench.recognises, all_reduce_bench.read_all_reduce_bench),
    (nccl_tests.recognises, nccl_tests.read_nccl_tests),
)


def read_collective_log(path: Path, hints: Hints = _NO_HINTS) -> CollectiveLog:
    """Read a file by what is in it.

    Args:
        path: of nccl-tests or rccl-tests, all_reduce_bench, DeepSpeed's comms logger, a Galvatron profile, or CSV.
        hints: what the file does not say itself.

    Raises:
        InputError: no such file, or none of these; or what the reader of its format refuses.

    """
    name = str(path)
    if not path.is_file():
        raise InputError(f"{name!a} {'is a folder' if path.is_dir() else 'does not exist'}; allowed: a log or CSV file")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{name}: {path.stat().st_size:,} bytes; allowed: at most {MAX_BYTES:,}")
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise InputError(f"{name}: not a text file; allowed: a log or CSV file")
    for recognises, read in _READERS:
        if recognises(text):
            return read(text, name, hints)
    raise InputError(
        f"{name}: no table of measured collectives; allowed: output of nccl-tests, all_reduce_bench, DeepSpeed's comms"
        f" logger, a Galvatron profile, or CSV with the columns collective, gpus, message_bytes, time_us"
    )
