"""Where a DeepSpeed configuration lies, and its text."""

from pathlib import Path

from zsim.documents import Document, InputError, read


def read_configuration(given: str, base: Path, *, is_typed: bool) -> Document:
    """Read the file, YAML by its ending, else as DeepSpeed reads it whatever it is called.

    Args:
        given: its path; `~` is the home folder.
        base: folder of the experiment, from which a relative path starts.
        is_typed: given on the command line, where a relative path may also start from the working folder.

    Raises:
        InputError: no such file, two of them, or not well-formed.

    """
    path = Path(given).expanduser() if given.startswith("~/") else Path(given)
    beside, here = base / path, Path.cwd() / path
    is_here = is_typed and _is_file(here)
    if is_here and _is_file(beside) and not beside.samefile(here):
        raise InputError(
            f"{given!a} lies beside the experiment ({beside}) and in the working folder ({here}); allowed: the whole"
            f" path of one"
        )
    json = path.suffix.lower() not in {".yaml", ".yml"}
    if is_here and not _is_file(beside):
        return read(here, str(here), json=json)
    return read(beside, given if path == Path(given) else str(path), json=json)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have; reading it says why
        return False
