"""The reference in docs/: links resolve, and no key, switch or runtime is missing from it or told wrongly."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

import zsim
from zsim.reading import data
from zsim.reading.config import (
    ClusterSettings,
    ExpertsSettings,
    FsdpSettings,
    LoraSettings,
    MeasuredSettings,
    ModelSettings,
    NoiseSettings,
    Settings,
    TrainSettings,
)
from zsim.spec import DeviceSpec, NetworkSpec, Optimisations

ROOT = Path(__file__).parents[1]
MARKDOWN = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]
    if path.is_file()
)
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
OWN_EXPERIMENT = ROOT / "experiments" / "llama_7b_own_config.yaml"


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def section(document: str, heading: str) -> str:
    """From one heading to the next of the same level or above."""
    level = heading.partition(" ")[0]
    after = document.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{1,{len(level)}}} ", after, maxsplit=1)[0]


def words(hint: Any) -> tuple[str, ...]:
    """Values of a switch as a user writes them."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return ("true", "false") if hint is bool else ()


@pytest.mark.parametrize("document", MARKDOWN, ids=lambda path: path.name)
def test_relative_links_resolve(document):
    targets = [link.partition("#")[0] for link in LINK.findall(document.read_text("utf-8")) if "://" not in link]
    missing = [target for target in targets if target and not (document.parent / target).exists()]
    assert not missing


def test_the_reference_is_linked_up():
    """The pattern finds links at all, and the three pages lead to one another."""
    assert {"topology.md", "optimisations.md", "deepspeed_config.md", "my_cluster.yaml"} <= set(
        LINK.findall(text("experiment.md"))
    )


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("## Top level", Settings),
        ("### `experts`", ExpertsSettings),
        ("### `lora`", LoraSettings),
        ("## `cluster`", ClusterSettings),
        ("## `train`", TrainSettings),
        ("## `noise`", NoiseSettings),
        ("## `fsdp`", FsdpSettings),
        ("## `measured` and `assumed`", MeasuredSettings),
    ],
)
def test_keys_of_an_experiment(heading, model):
    """A row for each key of a section and none for others."""
    told = re.findall(r"^\| `(\w+)` \|", section(text("experiment.md"), heading), re.MULTILINE)
    assert sorted(told) == sorted(model.model_fields)


def test_keys_of_a_model():
    """Those of its own table; experts and adapters have tables below it."""
    told = re.findall(r"^\| `(\w+)` \|", section(text("experiment.md"), "## `model`").partition("###")[0], re.MULTILINE)
    assert sorted(told) == sorted(ModelSettings.model_fields)


@pytest.mark.parametrize("model", [ModelSettings, TrainSettings])
def test_allowed_words_of_an_experiment(model):
    document = text("experiment.md")
    for name, field in model.model_fields.items():
        for hint in (field.annotation, *get_args(field.annotation)):
            row = next(line for line in document.splitlines() if line.startswith(f"| `{name}` |"))
            assert all(f"`{word}`" in row for word in (words(hint) if hint is not bool else ())), name


@pytest.mark.parametrize(("heading", "record"), [("## `network`", NetworkSpec), ("## The device", DeviceSpec)])
def test_keys_of_a_topology(heading, record):
    rows = re.findall(r"^\| (`[^|]*`) \|", section(text("topology.md"), heading), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    # A device file names itself under `device`.
    expected = {"device" if field.name == "name" else field.name for field in fields(record)}
    assert told - {"description"} == expected


def test_keys_of_a_topology_of_cpus():
    """All of its file, and of the device's."""
    rows = re.findall(r"^\| (`[^|]*`) \|", section(text("topology.md"), "## Clusters of CPUs"), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"network", "shaping"}
    folder = ROOT / "topologies"
    lab, core = (
        yaml.safe_load((folder / name).read_text("utf-8")) for name in ("lab.yaml", "devices/epyc-zen4-core.yaml")
    )
    assert told == (set(lab) | set(lab["shaping"]) | set(lab["network"]) | set(core)) - {"network", "shaping"}


@pytest.mark.parametrize("name", get_type_hints(Optimisations))
def test_switches_and_their_values(name):
    heading = next(line for line in text("optimisations.md").splitlines() if line.startswith(f"### `{name}`: "))
    assert set(re.findall(r"`(\w+)`", heading.partition(": ")[2])) == set(
        words(get_type_hints(Optimisations)[name])
    ) or (get_type_hints(Optimisations)[name] is int and "whole number" in heading)


def test_the_table_of_runtimes():
    """All runtimes, all switches, each value as its file has it."""
    header, _, *rows = [
        line for line in section(text("optimisations.md"), "## Values of the runtimes").splitlines() if line[:1] == "|"
    ]
    runtimes = [name.strip("`") for name in cells(header)[1:]]
    assert sorted(runtimes) == sorted(data.names("runtimes"))
    told = {cells(row)[0].strip("`"): cells(row)[1:] for row in rows}
    files = [yaml.safe_load((ROOT / "runtimes" / f"{name}.yaml").read_text("utf-8")) for name in runtimes]
    assert told == {
        field.name: [str(file["optimisations"].get(field.name, field.default)).lower() for file in files]
        for field in fields(Optimisations)
    }


def test_versions_in_between_are_refused_by_name():
    experiment = zsim.load(OWN_EXPERIMENT, ["runtime=deepspeed-0.9.5"])
    with pytest.raises(ValueError, match=r"deepspeed-0\.6\.0 and deepspeed-0\.18"):
        zsim.resolve(experiment)


def test_the_own_cluster_resolves_by_path():
    experiment = zsim.load(OWN_EXPERIMENT)
    assert experiment.settings.cluster.topology == "../docs/my_cluster.yaml"
    spec = zsim.resolve(experiment)
    assert spec.cluster.topology == "my-cluster"
    assert (spec.train.micro_batch, spec.train.gradient_accumulation, spec.train.precision) == (4, 8, "bf16")


def test_the_example_in_the_text_is_the_file():
    assert OWN_EXPERIMENT.read_text("utf-8") in text("experiment.md")
