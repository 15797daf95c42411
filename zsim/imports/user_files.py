"""Where a file lies that an experiment names, or that was named on the command line."""

from pathlib import Path

from zsim.units import InputError


def locate(given: str, base: Path, *, is_typed: bool) -> tuple[Path, str]:
    """The file, and its name for messages; whether it exists is for its reader to say.

    Args:
        given: its path; `~` is the home folder.
        base: folder of the experiment, from which a relative path starts.
        is_typed: given on the command line, where a relative path may also start from the working folder.

    Raises:
        InputError: there are two of them, or no path was given.

    """
    if not given.strip():
        raise InputError(f"given {given!a}; allowed: the path of a file")
    path = Path(given).expanduser() if given.startswith("~/") else Path(given)
    beside, here = base / path, Path.cwd() / path
    is_here = is_typed and _exists(here)
    if is_here and _exists(beside) and not beside.samefile(here):
        raise InputError(
            f"{given!a} lies beside the experiment ({beside}) and in the working folder ({here}); allowed: the whole"
            f" path of one"
        )
    if is_here and not _exists(beside):
        return here, str(here)
    return beside, given if path == Path(given) else str(path)


def is_folder(path: Path) -> bool:
    """Whether a path is that of a folder; a name that no file can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have; reading it says why
        return False
