"""Where the data files are: beside the package in a checkout of the repository, inside it once installed."""

from pathlib import Path
from typing import Final, Literal

from zsim.reading.documents import Document, InputError, nearest, read

Folder = Literal["topologies", "runtimes", "models", "experiments"]

_PACKAGE: Final = Path(__file__).resolve().parents[1]


def folder(name: Folder) -> Path:
    """The folder of one kind of data files."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def root() -> Path:
    """The folder that has the folders of data files."""
    return folder("runtimes").parent


def names(kind: Folder) -> tuple[str, ...]:
    """What a user may name, sorted: the files of the folder without their ending."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in folder(kind).glob("*.yaml")))


def find(kind: Literal["topologies", "runtimes"], name: str, base: Path, where: str) -> Document:
    """Read a data file by its name, or a user's own by its path relative to `base`."""
    if is_path(name):
        try:
            return read(base / name)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    path = folder(kind) / f"{name}.yaml"
    if name not in names(kind):
        hint = _neighbours(name, names(kind)) or nearest(name, names(kind))
        raise InputError(f"{where}: unknown {name!a}; {hint}, or the path of a .yaml file")
    return read(path, f"{kind}/{path.name}")


def experiment(path: Path) -> Path:
    """A user's own experiment file, or one that ships under this name where there is no such file."""
    name = path.name.removesuffix(".yaml")
    if path.parent != Path() or name not in names("experiments") or path.exists():
        return path
    return folder("experiments") / f"{name}.yaml"


def is_path(name: str) -> bool:
    """Whether a user's string names a file of theirs and not one of ours."""
    return "/" in name or name.endswith((".yaml", ".yml", ".json"))


def _neighbours(name: str, known: tuple[str, ...]) -> str:
    """For a version of a known framework that has no file: the versions below and above it."""
    framework, _, version = name.rpartition("-")
    wanted = _version(version)
    siblings = sorted(
        (parsed, candidate)
        for candidate in known
        if candidate.rpartition("-")[0] == framework and (parsed := _version(candidate.rpartition("-")[2]))
    )
    if not framework or not wanted or not siblings:
        return ""
    below = [candidate for parsed, candidate in siblings if parsed < wanted][-1:]
    above = [candidate for parsed, candidate in siblings if parsed > wanted][:1]
    return f"its neighbours are {' and '.join(below + above)}"


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() and len(part) < 9 for part in parts) else ()
