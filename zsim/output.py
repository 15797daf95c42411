"""Files that appear whole or not at all, and whose folder is proven writable before the work begins."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READ_WRITE = 0o666


@contextmanager
def replacing(path: Path, option: str) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`; on success it takes the name, on failure it vanishes.

    Args:
        path: what the user asked for; devices and pipes are written directly.
        option: what the user calls it, for the message.

    Raises:
        ValueError: nothing can be written there.

    """
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, allowed is the path of a file")
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot write into {target.parent}: {error.strerror}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(READ_WRITE & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def json_text(document: dict[str, Any]) -> str:
    """One JSON document; a number that JSON cannot hold is our own mistake and raises."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
