"""The rules of DESIGN.md: what may import what, one library one home, and sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zsim"
FILES = sorted(PACKAGE.rglob("*.py"))
REFERENCE_FILES = sorted((ROOT / "reference").rglob("*.py"))

VOCABULARY = {
    "allocator_settings",
    "auto_values",
    "ops",
    "spec",
    "cpu_spec",
    "megatron_spec",
    "noise_spec",
    "model_spec",
    "ranks",
    "software",
    "trace",
    "snapshot",
    "errors",
    "units",
    "display",
}
WIRING = {
    "",
    "__main__",
    "cli",
    "commands",
    "pipeline",
    "program_size",
    "compute_work",
    "model_work",
    "noise",
    "explanation",
    "uncertainty",
    "workers",
    "fitting",
    "studies",
    "sweeps",
    "comparing",
    "validation",
}
MAY_IMPORT = {
    "allocator": set(),
    "reading": {"imports", "model"},
    "imports": {"reading", "model"},
    "model": set(),
    "strategies": {"model"},
    "costs": set(),
    "check": set(),
    "engine": {"check", "allocator"},
    "program_memory": {"engine", "figures"},
    "figures": set(),
    "writing": {"figures", "reading"},
    "calibration": {"imports", "reading", "figures", "costs", "model"},
}
"""Beside the vocabulary and itself: data flows one way. What wires the stages may import all of them."""

HOMES = {
    "simpy": {"engine.fabric"},
    "networkx": {"reading.hardware"},
    "matplotlib": {"writing.plots"},
    "yaml": {"reading.documents"},
    "pydantic": {"reading.config"},
    "rich": {
        "writing.report",
        "writing.comparison_report",
        "writing.memory_report",
        "writing.replay_report",
        "writing.listing",
        "writing.tables",
        "commands",
    },
    "typer": {"cli", "commands"},
    "numba": {"allocator.compiled", "engine.lockstep"},
    "llvmlite": {"engine.lockstep"},
    "numpy": {
        "allocator.compiled",
        "calibration",
        "engine.lockstep",
        "figures.breakdown",
        "engine.rank_times",
        "figures.stragglers",
        "figures.streams",
        "noise",
        "studies",
        "ranks",
        "validation",
    },
    "scipy": {"calibration", "validation"},
    "polars": {"sweeps"},
    "distributed": {"sweeps"},
    "torch": set(),
}
"""Who may import a library, at any level of the file."""

FILE_LIMIT, FUNCTION_LIMIT = 400, 80


def part(path):
    """The first name below the package: `costs` for zsim/costs/nccl.py, nothing for zsim/__init__.py."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def home(path):
    """Part and module where modules of a part differ: `reading.hardware`, but `commands`."""
    mine = part(path)
    if mine not in {"reading", "engine", "figures", "writing", "allocator"}:
        return mine
    return f"{mine}.{path.relative_to(PACKAGE).parts[1].removesuffix('.py')}"


def imported(path):
    """Dotted names of everything a file imports, `from package import name` as package.name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_parts(path):
    """Parts of the package that a file imports."""
    for name in imported(path):
        package, _, rest = name.partition(".")
        if package == "zsim":
            first = rest.partition(".")[0]
            yield first if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").exists() else ""


def test_every_part_has_its_place():
    assert {part(path) for path in FILES} == VOCABULARY | WIRING | set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_module_imports(path):
    mine = part(path)
    if mine in WIRING:
        return
    # The package itself stands for its version.
    allowed = VOCABULARY | {mine, ""} | MAY_IMPORT.get(mine, set())
    forbidden = set(own_parts(path)) - allowed
    assert not forbidden, f"{path.name} ({mine}) imports {sorted(forbidden)}"


def test_strategies_costs_and_engine_never_meet():
    """The table above must not be loosened into allowing it."""
    for one in ("strategies", "costs", "engine"):
        assert MAY_IMPORT[one] <= {"model", "check", "allocator"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_library_has_one_home(path):
    for name in imported(path):
        library = name.partition(".")[0]
        if library in HOMES:
            assert home(path) in HOMES[library], f"{path.name} imports {library}, whose home is {HOMES[library]}"


def test_the_simulator_reaches_the_reference_engine_only_from_within_commands():
    for path in FILES:
        if "reference" not in {name.partition(".")[0] for name in imported(path)}:
            continue
        assert part(path) == "commands", path.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "reference" for name in names), path.name


def test_torch_is_at_home_in_the_reference_engine():
    assert any(name.partition(".")[0] == "torch" for path in REFERENCE_FILES for name in imported(path))


def test_homes_are_in_use():
    used = {(name.partition(".")[0], home(path)) for path in FILES for name in imported(path)}
    for library, homes in HOMES.items():
        assert {home for home in homes if (library, home) not in used} == set()


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import zsim", {"torch", "matplotlib", "simpy", "networkx", "pydantic", "numpy", "yaml"}),
        (
            "from zsim import cli; cli.main(['--help'])",
            {"torch", "matplotlib", "simpy", "networkx", "pydantic", "numpy"},
        ),
        ("import zsim.pipeline", {"torch", "matplotlib"}),
        ("from zsim import cli; cli.main(['list', 'runtimes'])", {"torch", "matplotlib", "simpy"}),
    ],
)
def test_nothing_heavy_is_loaded(program, absent):
    report = f"import sys\ntry:\n    {program}\nexcept SystemExit:\n    pass\nprint('loaded', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.rpartition("\nloaded ")[2].split() if "\n" in result.stdout else result.stdout.split())
    assert "zsim" in loaded
    assert not loaded & absent


@pytest.mark.parametrize("folder", ["zsim", "reference", "tests", "benchmarks"])
def test_sizes(folder):
    too_long = []
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > FILE_LIMIT:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LIMIT:
                    too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert not too_long


def test_no_module_level_state():
    """Registries are literals; nothing at module level is an empty container to be filled later."""
    for path in [*FILES, *REFERENCE_FILES]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.List | ast.Dict) and not (
                value.keys if isinstance(value, ast.Dict) else value.elts
            )
            call = isinstance(value, ast.Call) and getattr(value.func, "id", "") in {
                "list",
                "dict",
                "set",
                "defaultdict",
            }
            assert not empty, f"{path.name}:{node.lineno}"
            assert not (call and not value.args), f"{path.name}:{node.lineno}"
