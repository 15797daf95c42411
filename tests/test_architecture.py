"""The rules of DESIGN.md: what may import what, one library one home, and sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zsim"
FILES = sorted(PACKAGE.rglob("*.py"))

FAMILIES = {
    "vocabulary": {"ops", "spec", "model_spec", "software", "trace", "errors", "units", "display"},
    "reading": {
        "documents",
        "hjson_reader",
        "scalars",
        "autos",
        "constants",
        "data",
        "config",
        "presets",
        "shapes",
        "hardware",
        "runtime",
        "zero_settings",
        "fsdp_settings",
        "effects",
        "switches",
        "twins",
        "resolution",
        "imports",
        "catalogue",
    },
    "model": {"leaf_modules", "modules", "layers", "architectures", "adapters", "autograd", "model"},
    "strategies": {"strategies"},
    "costs": {"costs"},
    "check": {"check"},
    "engine": {"engine", "fabric", "hosts", "lanes", "lowering", "rendezvous"},
    "figures": {
        "breakdown",
        "kernels",
        "streams",
        "causes",
        "differences",
        "windows",
        "states",
        "memory",
        "comparison",
        "planner",
        "metrics",
        "findings",
    },
    "faces": {"report", "plots", "chrome_trace", "listing", "output", "progress"},
    "wiring": {"", "pipeline", "explanation", "compute_work", "program_size", "workers", "studies", "sweeps", "fitting"}
    | {"cli", "commands", "__main__"},
}
"""Every module of the package, by what it is for."""

MAY_IMPORT = {
    "vocabulary": set(),
    "reading": {"vocabulary", "model"},
    "model": {"vocabulary"},
    "strategies": {"vocabulary", "model"},
    "costs": {"vocabulary"},
    "check": {"vocabulary"},
    "engine": {"vocabulary", "check"},
    "figures": {"vocabulary"},
    "faces": {"vocabulary", "figures", "reading"},
    "wiring": set(FAMILIES),
}
"""Beside its own family: data flows one way, and the stages know only the vocabulary."""

HOMES = {
    "simpy": {"fabric"},
    "networkx": {"hardware"},
    "matplotlib": {"plots"},
    "yaml": {"documents"},
    "pydantic": {"config"},
    "rich": {"report", "listing", "commands"},
    "typer": {"cli", "commands"},
    "numpy": {"breakdown", "streams", "pipeline"},
    "polars": {"sweeps"},
    "distributed": {"sweeps"},
    "torch": set(),
}
"""Who may import a library, at any level of the file."""

FILE_LIMIT, FUNCTION_LIMIT = 400, 80


def part(path):
    """The module's first name below the package: `costs` for zsim/costs/nccl.py, nothing for zsim/__init__.py."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def family(name):
    (found,) = [one for one, members in FAMILIES.items() if name in members]
    return found


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


def test_every_module_has_a_family():
    assert {part(path) for path in FILES} == set().union(*FAMILIES.values())
    assert sum(len(members) for members in FAMILIES.values()) == len(set().union(*FAMILIES.values()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_module_imports(path):
    mine = family(part(path))
    found = {name: family(name) for name in own_parts(path)}
    # The package itself stands for its version and its data files' home.
    forbidden = {name for name, theirs in found.items() if name and theirs not in MAY_IMPORT[mine] | {mine}}
    assert not forbidden, f"{path.name} ({mine}) imports {sorted(forbidden)}"


def test_strategies_costs_and_engine_never_meet():
    """The table above must not be loosened into allowing it."""
    apart = ("strategies", "costs", "engine")
    for one in apart:
        assert not MAY_IMPORT[one] & (set(apart) - {one})
        assert MAY_IMPORT[one] <= {"vocabulary", "model", "check"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_library_has_one_home(path):
    for name in imported(path):
        library = name.partition(".")[0]
        if library in HOMES:
            assert part(path) in HOMES[library], f"{path.name} imports {library}, whose home is {HOMES[library]}"


def test_homes_are_in_use():
    used = {(name.partition(".")[0], part(path)) for path in FILES for name in imported(path)}
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


@pytest.mark.parametrize("folder", ["zsim", "tests", "benchmarks"])
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
    for path in FILES:
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
