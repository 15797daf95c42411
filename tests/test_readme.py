"""Every console block of the README and of docs/ is run; what it prints must be what the text says.

`python tests/test_readme.py` runs them and writes their present output into the files.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import zsim

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console\n\$ (zsim [^\n]*)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[Path, str, str]]:
    return [
        (document, match[1], match[2])
        for document in DOCUMENTS
        for match in BLOCK.finditer(document.read_text("utf-8"))
    ]


def run(command: str) -> str:
    """Standard output of a command at 100 columns, `| head -N` understood."""
    command, _, pipe = command.partition(" | head -")
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", "zsim", *shlex.split(command)[1:]],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    lines = (result.stdout + result.stderr).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines[: int(pipe) if pipe else None])


def test_there_are_commands_to_run():
    assert any(document.name == "README.md" for document, _, _ in blocks())


@pytest.mark.parametrize(("document", "command", "printed"), blocks(), ids=lambda value: str(value)[:60])
def test_a_documented_command_prints_what_the_text_says(document, command, printed):
    assert run(command) == printed, f"{document.name}: run `python tests/test_readme.py` and read what changed"


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "python.md"], ids=lambda path: path.name)
def test_a_documented_python_snippet_runs(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, document.name, "exec"), {})


@pytest.mark.parametrize("experiment", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_that_ships_runs(experiment):
    assert zsim.simulate(zsim.load(experiment)).step_time_s > 0


def _update() -> None:
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        document.write_text(BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{run(match[1])}```", text), "utf-8")


if __name__ == "__main__":
    _update()
