"""The text of a DeepSpeed configuration."""

from pathlib import Path

from zsim.imports.user_files import locate
from zsim.reading.documents import Document, read


def read_configuration(given: str, base: Path, *, is_typed: bool) -> Document:
    """Read the file, YAML by its ending, else as DeepSpeed reads it whatever it is called.

    Args:
        given: its path; `~` is the home folder.
        base: folder of the experiment, from which a relative path starts.
        is_typed: given on the command line, where a relative path may also start from the working folder.

    Raises:
        InputError: no such file, two of them, or not well-formed.

    """
    path, name = locate(given, base, is_typed=is_typed)
    return read(path, name, json=path.suffix.lower() not in {".yaml", ".yml"})
