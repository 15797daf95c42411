"""Files that appear whole or not at all, and whose folder is proven writable before the work begins."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zsim.units import InputError

READ_WRITE = 0o666
_ROOM_BYTES = 64 * 1024
"""Less than most pictures and traces, more than most documents."""


def check_distinct(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """No output takes the place of an input or of another output.

    Args:
        outputs: option -> where it writes; devices and pipes may be shared.
        inputs: files that the run reads.

    Raises:
        InputError: one does.

    """
    taken = {os.path.realpath(path): f"the input {path}" for path in inputs}
    for option, path in outputs.items():
        if path is None or str(path) == "-" or _is_special(path, option):
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise InputError(f"{option} {path}: would overwrite {taken[place]}; allowed is another file")
        taken[place] = f"what {option} writes"


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Around the writing of an output: a full disk is said with the option and the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written: {error.strerror or error}") from error


def check_writable(path: Path, option: str) -> None:
    """Proves, before the work begins, that `replacing` will be able to write there; leaves nothing behind.

    Raises:
        InputError: nothing can be written there.

    """

    class Proven(Exception):  # noqa: N818  what fails keeps the old file
        pass

    with suppress(Proven), replacing(path, option):
        raise Proven


def check_folder(path: Path, option: str) -> None:
    """Makes a folder for output, if need be, and proves that it can be written into.

    Raises:
        InputError: it is something else, or nothing can be written there.

    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = "is no folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise InputError(f"{option} {path}: cannot be written: {said}; allowed: a folder") from error
    with writing(path, option), tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(_ROOM_BYTES))


@contextmanager
def replacing(path: Path, option: str) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`; on success it takes the name, on failure it vanishes.

    Args:
        path: what the user asked for; devices and pipes are written directly.
        option: what the user calls it, for the message.

    Raises:
        InputError: nothing can be written there.

    """
    if str(path) == "-":
        raise InputError(f"{option} -: stdout is not offered here, allowed is the path of a file")
    is_special = _is_special(path, option)
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder, allowed is the path of a file")
    if is_special:
        yield path
        return
    target = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot write into {target.parent}: {error.strerror}") from error
    temporary = Path(name)
    try:
        with writing(path, option), os.fdopen(handle, "wb") as file:
            # A full disk is noticed before the work, not after it.
            file.write(bytes(_ROOM_BYTES))
        os.truncate(temporary, 0)
        yield temporary
        with writing(path, option):
            temporary.chmod(READ_WRITE & ~_umask())
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _is_special(path: Path, option: str) -> bool:
    """Whether it is a device or a pipe.

    Raises:
        InputError: no file can have such a name.

    """
    try:
        return path.exists() and not path.is_file()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written: {error.strerror}") from error


def _umask() -> int:
    """The process's mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def json_text(document: dict[str, Any], encoding: str = "utf-8") -> str:
    """One JSON document, escaped where `encoding` lacks a character; a number that JSON cannot hold raises."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    return text
