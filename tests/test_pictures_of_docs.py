"""docs/pictures.md: its commands are run; pictures and printed text must be what they give now.

`python tests/test_pictures_of_docs.py` draws them and writes what they print. What is written on a picture is in its
file's description; pixels are not compared, for they depend on the release of matplotlib.
"""

import os
import re
import shlex
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image

from zsim import cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pictures.md"
COMMAND = re.compile(r"```bash\n(zsim plot [^\n]*)\n```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
LARGEST_BYTES = 150_000


def commands():
    return [(match[1], match[2] or "") for match in COMMAND.finditer(PAGE.read_text("utf-8"))]


def run(command, out=None):
    """What a command prints; its picture goes to `out` if that is given."""
    arguments = shlex.split(command)[1:]
    if out is not None:
        arguments[arguments.index("--out") + 1] = str(out)
    printed = StringIO()
    with redirect_stdout(printed):
        assert cli.main(arguments) == 0
    return printed.getvalue()


def picture_of(command):
    words = shlex.split(command)
    return ROOT / words[words.index("--out") + 1]


def texts(path):
    with Image.open(path) as image:
        return image.info["Title"], image.info["Description"].split("; ")


def test_every_picture_is_described():
    names = {picture_of(command).name for command, _ in commands()}
    assert len(names) == len(commands()) == 9
    text = PAGE.read_text("utf-8")
    assert names == set(re.findall(r"!\[.+\]\(figures/(\S+)\)", text))


@pytest.mark.parametrize(("command", "printed"), commands(), ids=lambda value: value.split()[2:3] or "nothing")
def test_a_documented_picture_is_the_present_one(command, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "x.png"
    update = "run `python tests/test_pictures_of_docs.py`"
    assert run(command, out) == printed, update
    assert texts(out) == texts(picture_of(command)), update
    assert picture_of(command).stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
def test_the_python_snippet_runs(snippet, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, PAGE.name, "exec"), {})


def _update() -> None:
    os.chdir(ROOT)

    def present(match):
        printed = run(match[1])
        return f"```bash\n{match[1]}\n```\n" + (f"\n```text\n{printed}```\n" if printed else "")

    PAGE.write_text(COMMAND.sub(present, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    sys.exit(_update())
