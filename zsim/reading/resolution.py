"""Experiment + topology + runtime -> `Spec`: every choice made, every number SI.

Precedence: `--set` beats the files; `optimisations` beats the DeepSpeed configuration, which beats the defaults of the
runtime's version, which beat those common to all versions.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from zsim.cpu_spec import CpuClusterSpec
from zsim.imports.deepspeed_file import read_configuration
from zsim.model import build
from zsim.model.adapters import UntrainableError
from zsim.model.leaf_modules import WholeModelError, with_leaf_modules
from zsim.model_spec import ModelSpec
from zsim.reading import autos, data, hardware, twins
from zsim.reading.allocator_conf import AllocatorConf
from zsim.reading.allocator_conf import parse as parse_allocator_conf
from zsim.reading.config import Experiment, Settings, validate
from zsim.reading.constants import choice
from zsim.reading.cpu_cluster import check_kind, resolve_cpu_cluster
from zsim.reading.documents import Document, InputError, Keys, nearest, read
from zsim.reading.effects import without_effect
from zsim.reading.fsdp_settings import check_flattened, resolve_fsdp, with_wire_type
from zsim.reading.megatron_settings import resolve_megatron, with_modules
from zsim.reading.noise_settings import resolve_noise, shared_draws
from zsim.reading.own_constants import with_own_constants
from zsim.reading.places import Places
from zsim.reading.presets import Where, resolve_model
from zsim.reading.reference_settings import check_reference, resolve_optimizer_settings
from zsim.reading.runtime import Runtime, open_runtime, resolve_runtime
from zsim.reading.switches import compile_scope, resolve_optimizer
from zsim.reading.train_settings import resolve_train
from zsim.reading.zero_settings import ResolvedZero, check_groups, resolve_zero
from zsim.software import StackSpec
from zsim.spec import (
    ClusterSpec,
    Constant,
    FsdpSpec,
    Measurement,
    Optimisations,
    RuntimeSpec,
    Spec,
    TrainSpec,
    ZeroSpec,
)
from zsim.units import shown

_RESULTS: Final = "zsim-run/"
"""Schema of what runs write."""
_MOST_SWEPT: Final = 1_000
"""Values of one axis of a sweep."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read an experiment file and apply overrides such as `train.micro_batch=8`.

    Raises:
        InputError: a ValueError of one line: where, what was given, what is allowed.

    """
    path = data.experiment(Path(path))
    return of_document(read(path), path, overrides)


def of_document(document: Document, path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """As `load`, of what has been read or made; paths within it are relative to the folder of `path`."""
    raw = deepcopy(document.data)
    if str(raw.get("schema", "")).startswith(_RESULTS):
        raise InputError(f"{path}: given a result, of `zsim run` or `zsim measure`; allowed: an experiment")
    wanted = twins.parse(overrides)
    is_typed = ("deepspeed",) in wanted
    deepspeed = _read_deepspeed(raw, document, path, wanted)
    written = Places(document, deepspeed)
    twins.check_twins(raw, written.where)
    # A configuration that is typed goes with the cluster that is typed, not with that of the file.
    as_written = deepcopy(raw)
    twins.apply(as_written, {keys: value for keys, value in wanted.items() if is_typed and keys[0] == "cluster"})
    if num_ranks := _num_ranks(as_written, path, written.where):
        twins.check_batch(as_written, num_ranks, written.where)
    places = replace(written, overridden=frozenset(wanted))
    settings = _overridden(raw, wanted, places, path)
    experiment = Experiment(name=path.stem, path=path, settings=settings, places=places, raw=raw)
    _check_sweep(experiment)
    return experiment


def loaded(experiment: Experiment | str | Path) -> Experiment:
    """An experiment as it is, or that of a file."""
    return experiment if isinstance(experiment, Experiment) else load(experiment)


def variant(experiment: Experiment, assignments: Mapping[str, Any]) -> Experiment:
    """The experiment with other values: a row of a sweep, or a step of a search.

    Args:
        experiment: what all variants share.
        assignments: dotted key -> value, which may be a whole section or the path of a DeepSpeed configuration.

    Raises:
        InputError: a ValueError: the values do not go together.

    """
    raw = deepcopy(experiment.raw)
    raw.pop("sweep", None)
    # A section goes in before the keys within it.
    by_depth = sorted(assignments.items(), key=lambda item: item[0].count("."))
    wanted = {twins.plain_keys(tuple(name.split("."))): deepcopy(value) for name, value in by_depth}
    if len(wanted) < len(by_depth):
        raise InputError(f"{', '.join(assignments)}: a key is given with and without fsdp_; allowed: once")
    places, axes = experiment.places, frozenset(wanted)
    if ("deepspeed",) in wanted:
        config = _read_deepspeed(raw, places.document, experiment.path, wanted)
        places = replace(places, deepspeed=config)
    places = replace(places, overridden=places.overridden | axes, axes=axes)
    settings = _overridden(raw, wanted, places, experiment.path)
    return replace(experiment, settings=settings, places=places, raw=raw)


def _overridden(raw: dict[str, Any], wanted: dict[Keys, Any], places: Places, path: Path) -> Settings:
    """Applies overrides to `raw`, moves what depends on them, and validates."""
    twins.apply(raw, wanted)
    if (num_ranks := _num_ranks(raw, path, places.where)) and wanted:
        twins.recompute_batch(raw, wanted, num_ranks)
    settings = validate(raw, places)
    twins.check_twins(raw, places.where)
    if num_ranks:
        twins.check_batch(raw, num_ranks, places.where)
    return settings


def _read_deepspeed(raw: dict[str, Any], document: Document, path: Path, wanted: dict[Keys, Any]) -> Document | None:
    """Replaces the path of a DeepSpeed configuration by its content."""
    is_typed = ("deepspeed",) in wanted
    where = "--set deepspeed" if is_typed else document.where("deepspeed")
    given = wanted.pop(("deepspeed",), raw.get("deepspeed"))
    raw["deepspeed"] = given
    config = None
    if given is None:
        del raw["deepspeed"]
    if isinstance(given, str):
        try:
            config = read_configuration(given, path.parent, is_typed=is_typed)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        raw["deepspeed"] = deepcopy(config.data)
    if is_typed:
        twins.follow_configuration(raw)
    return config


def _num_ranks(raw: dict[str, Any], path: Path, where: Where) -> int | None:
    """Ranks, or None where what would tell is wrong or missing: validation says so better than this could."""
    cluster = raw.get("cluster")
    if not isinstance(cluster, dict) or not isinstance(cluster.get("topology"), str):
        return None
    nodes, gpus = cluster.get("nodes"), cluster.get("gpus_per_node", cluster.get("ranks_per_node"))
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        return None
    if gpus is None:
        gpus = hardware.open_topology(cluster["topology"], path.parent, where("cluster", "topology")).gpus_per_node
    return nodes * gpus if isinstance(gpus, int) and gpus >= 1 else None


def _check_sweep(experiment: Experiment) -> None:
    """Each value of each axis gives an experiment that is well-formed."""
    for name, values in experiment.settings.sweep.items():
        where = experiment.where("sweep", name)
        if not 1 <= len(values) <= _MOST_SWEPT:
            raise InputError(f"{where}: {len(values)} values; allowed: 1 to {_MOST_SWEPT}")
        for value in values:
            try:
                variant(experiment, {name: value})
            except InputError as error:
                raise InputError(f"{where} = {shown(value)}: {error}") from None


def resolve(experiment: Experiment) -> Spec:
    """Make every choice that the experiment leaves open.

    Raises:
        InputError: a ValueError of one line: where, what was given, what is allowed.

    """
    settings, where = experiment.settings, experiment.where
    topology = hardware.open_topology(settings.cluster.topology, experiment.base, where("cluster", "topology"))
    check_kind(experiment, topology)
    runtime = open_runtime(settings.runtime, experiment.base, where("runtime"), topology.kind)
    cluster, cluster_constants = _cluster(experiment, topology, runtime)
    runtime_spec, runtime_constants = resolve_runtime(runtime, topology.generation if topology.kind == "gpu" else None)
    resolved = resolve_model(settings.model, where, experiment.base, is_typed=experiment.is_typed("model", "hf_config"))
    model, model_notes = with_modules(resolved.spec, experiment, runtime)
    zero = resolve_zero(experiment, runtime, runtime_spec.optimisations, model)
    check_groups(zero.spec, cluster, experiment)
    runtime_spec = replace(runtime_spec, optimisations=_optimisations(experiment, runtime_spec, zero))
    scope, broken_graphs = compile_scope(experiment, runtime, zero.spec.stage)
    given_bytes = settings.model.activation_bytes_per_sample
    model = replace(model, compile=scope, activation_bytes_per_sample=given_bytes)
    optimizer = resolve_optimizer(experiment, runtime)
    allocator = _allocator(experiment, runtime_spec)
    train = resolve_train(experiment, runtime, zero, cluster, model)
    check_reference(experiment, runtime, train)
    fsdp = resolve_fsdp(experiment, runtime, cluster, train, model)
    train = replace(with_wire_type(train, runtime, fsdp.spec), optimizer_implementation=optimizer.implementation)
    train, megatron = resolve_megatron(experiment, runtime, train, cluster.num_ranks)
    _check_trained(model, train, fsdp.spec if runtime.framework == "fsdp1" else None, where)
    _check_leaf_modules(zero.spec, model, train, where)
    noise = resolve_noise(experiment, cluster, train)
    idle = without_effect(experiment, zero.config, runtime_spec, zero.spec, train, model=model)
    spec = Spec(
        name=experiment.name,
        question=settings.question,
        model=model,
        cluster=cluster,
        runtime=runtime_spec,
        zero=zero.spec,
        train=train,
        noise=noise,
        fsdp=fsdp.spec,
        megatron=megatron.spec,
        allocator=allocator.settings,
        optimizer=resolve_optimizer_settings(experiment, runtime),
        constants=(*cluster_constants, *runtime_constants),
        warnings=(
            *resolved.notes_on(train.seq_len),
            *(*model_notes, *megatron.warnings),
            *zero.warnings,
            *broken_graphs,
            *optimizer.warnings,
            *fsdp.warnings,
            *(f"environment.PYTORCH_CUDA_ALLOC_CONF: {note}" for note in allocator.notes),
            *shared_draws(noise, cluster.num_ranks),
            *idle,
            *_assumed(experiment),
            *_left_open(experiment),
        ),
        autos=autos.filled(settings.deepspeed or {}, zero.spec, model, train, cluster.num_ranks),
        measured=_measured(experiment),
    )
    generation = topology.generation if topology.kind == "gpu" else topology.kind
    return with_own_constants(spec, experiment, runtime.software, generation)


def _allocator(experiment: Experiment, runtime: RuntimeSpec) -> AllocatorConf:
    """What the environment sets of PyTorch's caching allocator, and what its version does."""
    place = experiment.where("environment", "PYTORCH_CUDA_ALLOC_CONF")
    conf = parse_allocator_conf(experiment.settings.environment.PYTORCH_CUDA_ALLOC_CONF, place)
    stack = runtime.stack
    if not isinstance(stack, StackSpec):
        given = experiment.settings.environment.PYTORCH_CUDA_ALLOC_CONF
        return AllocatorConf(conf.settings, ("has no effect: a CPU has no caching allocator",) if given else ())
    return AllocatorConf(replace(conf.settings, one_event_queue=stack.one_event_queue), conf.notes)


def _check_trained(model: ModelSpec, train: TrainSpec, fsdp1: FsdpSpec | None, where: Where) -> None:
    """Adapters and patterns name something, something is left to train, and fsdp1 can flatten it."""
    if model.lora.rank or model.frozen:
        try:
            graph = build(model, train)
        except UntrainableError as error:
            raise InputError(f"{where(*error.keys)}: {error.problem}") from None
        if fsdp1 is not None:
            check_flattened(graph, fsdp1, where)


def _check_leaf_modules(zero: ZeroSpec, model: ModelSpec, train: TrainSpec, where: Where) -> None:
    """A threshold that makes a leaf of the whole model leaves nothing to fetch in parts."""
    if zero.stage == 3 and zero.module_granularity_threshold:
        try:
            with_leaf_modules(build(model, train), zero.module_granularity_threshold)
        except WholeModelError as error:
            place = where("deepspeed", "zero_optimization", "stage3_module_granularity_threshold")
            raise InputError(f"{place}: {error}") from None


def _measured(experiment: Experiment) -> tuple[Measurement, ...]:
    """Measurements of the file as written; an override makes it another experiment."""
    measured = experiment.settings.measured
    if measured is None or experiment.places.overridden:
        return ()
    values = measured.model_dump(exclude={"source"}, exclude_none=True)
    return tuple(Measurement(metric, value, measured.source) for metric, value in values.items())


def _cluster(
    experiment: Experiment, topology: hardware.Topology, runtime: Runtime
) -> tuple[ClusterSpec | CpuClusterSpec, tuple[Constant, ...]]:
    if topology.kind == "cpu":
        return resolve_cpu_cluster(experiment, topology, runtime.software)
    given = experiment.settings.cluster
    gpus = given.gpus_per_node or topology.gpus_per_node
    if topology.gpus_per_node % gpus:
        place = experiment.where("cluster", "gpus_per_node")
        raise InputError(f"{place}: given {gpus}; allowed: a divisor of the node's {topology.gpus_per_node}")
    return hardware.resolve_cluster(topology, runtime.software, given.nodes, gpus, given.price_per_node_hour)


def _optimisations(experiment: Experiment, runtime: RuntimeSpec, zero: ResolvedZero) -> Optimisations:
    hints = get_type_hints(Optimisations)
    changes: dict[str, Any] = {}
    if zero.multi_rank_all_reduce is not None:
        changes["multi_rank_all_reduce"] = zero.multi_rank_all_reduce
    for name, value in experiment.settings.optimisations.items():
        place = experiment.where("optimisations", name)
        if name not in hints:
            raise InputError(f"{place}: unknown key; {nearest(name, hints)}")
        changes[name] = choice(value, hints[name], place)
    return replace(runtime.optimisations, **changes)


def _left_open(experiment: Experiment) -> list[str]:
    """Choices that change the answer much and that the file does not make; and what one run cannot use."""
    settings = experiment.settings
    silent = [
        f"{section}.{name} = {getattr(values, name)}"
        for section, values, name in (
            ("model", settings.model, "attention"),
            ("train", settings.train, "activation_checkpointing"),
        )
        if name not in values.model_fields_set
    ]
    lines = [f"not stated, so taken: {', '.join(silent)}"] if silent else []
    return [*lines, "sweep: has no effect in a single run"] if settings.sweep else lines


def _assumed(experiment: Experiment) -> list[str]:
    """What the file says its source does not state."""
    raw = experiment.settings.model_dump()
    lines = []
    for name in experiment.settings.assumed:
        value = twins.get(raw, tuple(name.split(".")))
        if value is twins.ABSENT:
            raise InputError(f"{experiment.where('assumed')}: {name!a} is no key of an experiment")
        if isinstance(value, dict):
            # A size of nothing is one that was not given.
            given = {key: item for key, item in value.items() if item is not None and repr(item) != "0.0"}
            value = ", ".join(f"{key} {item}" for key, item in given.items())
        lines.append(f"assumed: {name} = {value}")
    return lines
