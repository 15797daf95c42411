"""runtimes/*.yaml -> one version of a framework: its switches, its host costs and the software stack below it.

A runtime names its software generation; `runtimes/software/<generation>.yaml` holds what all runtimes of that time
share: `stack` (what kernels reach on a GPU generation) and `host` (costs of PyTorch itself). The runtime's own `host`
adds what its hooks cost, and overrides what differs, as `stack` does.
"""

from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_type_hints

from zsim.cpu_spec import CpuStackSpec
from zsim.imports.deepspeed_keys import GRAMMARS, SWITCHES, ZERO_KNOWN, Grammar, Time
from zsim.imports.reference_keys import ABSENT_IN_REFERENCE, OPTIMIZERS_OF_REFERENCE
from zsim.megatron_spec import MegatronSpec
from zsim.model_spec import Implementation
from zsim.reading import data
from zsim.reading.constants import Reader, choice
from zsim.reading.documents import Document, InputError, read
from zsim.software import HostCosts, StackSpec
from zsim.spec import (
    Constant,
    DeviceKind,
    Framework,
    Generation,
    Optimisations,
    OptimizerImplementation,
    RuntimeSpec,
)
from zsim.units import shown

WireType = Literal["precision", "fp16", "bf16", "fp32"]
"""Type of gradients on the wire; `precision`, where a runtime says nothing, is that of training."""

_KEYS: Final = (
    "runtime",
    "description",
    "framework",
    "software",
    "stack",
    "host",
    "optimisations",
    "persistence_inclusive",
    "defaults",
    "configuration",
    "fixed",
    "communication_data_type",
    "ddp",
    "modules",
    "megatron",
)
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime's file and that of its software; numbers are read once the GPU generation is known."""

    document: Document
    software_document: Document
    framework: Framework
    software: str
    kind: DeviceKind
    """What the software runs on."""
    communication_data_type: WireType
    grammar: Grammar
    """How this version reads a DeepSpeed configuration."""
    defaults: dict[str, Any]
    """Defaults of `zero_optimization` in this version where they differ; a value, or stage -> value."""
    torch_compile: bool
    """Whether the software has torch.compile."""
    torch_optimizers: tuple[OptimizerImplementation, ...]
    """Implementations of torch.optim in the software, the one that it takes by default first."""
    torch_early_stop: bool
    """Whether checkpoints without `use_reentrant` end their recomputation early, as since PyTorch 2.1."""
    fixed: dict[str, Any]
    """Stage -> switches of `zero_optimization` that this version takes as they are here, whatever it is given."""
    modules: Implementation
    """Whose modules the model is made of."""
    megatron: dict[str, bool | int]
    """Megatron-LM's arguments in this version."""


def open_runtime(name: str, base: Path, where: str, kind: DeviceKind = "gpu") -> Runtime:
    """Find a runtime by name, or by path relative to `base`; a version in between names its neighbours.

    `kind` chooses among its software, where it runs on GPUs and on CPUs.
    """
    document = data.find("runtimes", name, base, where)
    reader = Reader(document, "", "")
    reader.known(document.data, dict.fromkeys(_KEYS), ())
    for needed in ("runtime", "framework", "software", "persistence_inclusive"):
        if document.data.get(needed) is None:
            raise InputError(f"{document.where(needed)} is missing")
    software = _software_for(kind, document, where)
    software_document = _software(software, kind, document, base)
    return Runtime(
        document=document,
        software_document=software_document,
        framework=cast("Framework", choice(document.data["framework"], Framework, document.where("framework"))),
        software=software,
        kind=kind,
        communication_data_type=cast(
            "WireType",
            choice(
                document.data.get("communication_data_type", "precision"),
                WireType,
                document.where("communication_data_type"),
            ),
        ),
        grammar=_grammar(document),
        defaults=reader.mapping(("defaults",)) if "defaults" in document.data else {},
        torch_compile=_torch_compile(software_document),
        torch_optimizers=_torch_optimizers(software_document),
        torch_early_stop=_torch_early_stop(software_document),
        fixed=_fixed(reader),
        modules=cast(
            "Implementation",
            choice(document.data.get("modules", "transformers"), Implementation, document.where("modules")),
        ),
        megatron=_megatron(reader),
    )


def kinds_of_device(name: str, base: Path, where: str) -> tuple[DeviceKind, ...]:
    """What a runtime has software for."""
    return tuple(_software_by_kind(data.find("runtimes", name, base, where)))


def _software_by_kind(document: Document) -> dict[DeviceKind, str]:
    """One name is software for GPUs; a mapping names that of each kind of device."""
    given = document.data.get("software")
    named: dict[str, Any] = given if isinstance(given, dict) else {"gpu": given}
    Reader(document, "", "").known(named, dict.fromkeys(get_args(DeviceKind)), ("software",))
    return {cast("DeviceKind", kind): str(software) for kind, software in named.items()}


def _software_for(kind: DeviceKind, document: Document, where: str) -> str:
    named = _software_by_kind(document)
    if kind not in named:
        runtime = document.data["runtime"]
        devices = " and ".join(name.upper() + "s" for name in named)
        ours = sorted(path.stem for path in data.folder("runtimes").glob("*.yaml"))
        allowed = [name for name in ours if kind in kinds_of_device(name, Path(), where)]
        raise InputError(
            f"{where}: {runtime} with {kind.upper()}s; its software is for {devices}; allowed: {', '.join(allowed)}"
        )
    return str(named[kind])


def _grammar(document: Document) -> Grammar:
    """That of the time the file names, by default the latest; other frameworks take all keys and refuse none."""
    if document.data["framework"] in {"deepspeed", "reference"}:
        time = choice(document.data.get("configuration", "2026"), Time, document.where("configuration"))
        grammar = GRAMMARS[cast("Time", time)]
        if document.data["framework"] == "deepspeed":
            return grammar
        return replace(grammar, absent=ABSENT_IN_REFERENCE, optimizers=OPTIMIZERS_OF_REFERENCE)
    if "configuration" in document.data:
        raise InputError(f"{document.where('configuration')}: given for another framework; allowed: for deepspeed")
    latest = GRAMMARS["2026"]
    nothing: frozenset[Any] = frozenset()
    return Grammar(ZERO_KNOWN, False, nothing, latest.wire_types, nothing, nothing)


def _torch_compile(software: Document) -> bool:
    """`torch.compile`, and whether the host costs that it needs are there."""
    reader, where = Reader(software, "", ""), software.where("torch", "compile")
    section = reader.mapping(("torch",))
    if "compile" not in section:
        raise InputError(f"{where} is missing; allowed: true or false")
    given: bool = choice(section["compile"], bool, where)
    if given:
        for name in ("compiled_call_s", "compiled_launch_s"):
            if name not in reader.mapping(("host",)):
                raise InputError(f"{software.where('host', name)} is missing; torch.compile is true")
    return given


def _torch_optimizers(software: Document) -> tuple[OptimizerImplementation, ...]:
    """What `torch.optimizers` lists."""
    reader, where = Reader(software, "", ""), software.where("torch", "optimizers")
    section = reader.mapping(("torch",))
    reader.known(section, dict.fromkeys(("compile", "optimizers", "checkpoint_early_stop")), ("torch",))
    given = section.get("optimizers")
    if not isinstance(given, list) or not given:
        problem = "is missing" if given is None else f"given {shown(given)}; allowed: a list"
        raise InputError(f"{where}: {problem} of {', '.join(get_args(OptimizerImplementation))}")
    return tuple(choice(name, OptimizerImplementation, where) for name in given)


def _torch_early_stop(software: Document) -> bool:
    """`torch.checkpoint_early_stop`; false where nothing says so."""
    section, where = Reader(software, "", "").mapping(("torch",)), software.where("torch", "checkpoint_early_stop")
    given: bool = choice(section.get("checkpoint_early_stop", False), bool, where)
    return given


def _fixed(reader: Reader) -> dict[str, Any]:
    if "fixed" not in reader.document.data:
        return {}
    found = {stage: reader.mapping(("fixed", stage)) for stage in reader.mapping(("fixed",))}
    for stage, switches in found.items():
        reader.known(switches, SWITCHES, ("fixed", stage))
        for name, value in switches.items():
            choice(value, bool, reader.document.where("fixed", stage, name))
    return found


def _megatron(reader: Reader) -> dict[str, bool | int]:
    """Each argument of Megatron-LM that is no rule of its own."""
    document = reader.document
    if document.data.get("modules") != "megatron":
        if "megatron" in document.data:
            raise InputError(f"{document.where('megatron')}: given for other modules; allowed: with modules: megatron")
        return {}
    section = reader.mapping(("megatron",))
    types = get_type_hints(MegatronSpec)
    reader.known(section, types, ("megatron",))
    for name, value in section.items():
        choice(value, types[name], document.where("megatron", name))
    return section


def _software(name: str, kind: DeviceKind, runtime: Document, base: Path) -> Document:
    """Looked for beside a user's own runtime first, then among ours."""
    own = base / Path(runtime.name).parent / "software"
    folder = data.folder("runtimes") / "software"
    paths = {path.stem: path for place in (folder, own) for path in sorted(place.glob("*.yaml"))}
    if name in paths:
        document = read(paths[name], f"runtimes/software/{name}.yaml")
        if document.data.get("kind", "gpu") == kind:
            return document
    allowed = ", ".join(sorted(stem for stem, path in paths.items() if read(path).data.get("kind", "gpu") == kind))
    problem = f"is not for {kind.upper()}s" if name in paths else "unknown"
    raise InputError(f"{runtime.where('software')}: {problem} {name!a}; allowed: {allowed}")


def resolve_runtime(runtime: Runtime, generation: Generation | None) -> tuple[RuntimeSpec, tuple[Constant, ...]]:
    """The runtime on GPUs of one generation, or on CPUs (None), and a constant for each of its numbers."""
    own = Reader(runtime.document, runtime.software, generation or runtime.kind)
    shared = Reader(runtime.software_document, runtime.software, generation or runtime.kind)
    shared.known(
        runtime.software_document.data, dict.fromkeys(("software", "description", "kind", "torch", "stack", "host")), ()
    )
    kind = CpuStackSpec if runtime.kind == "cpu" else StackSpec
    stack, stack_constants = _stack(own, shared, kind)
    host, host_constants = _host_costs(own, shared)
    bucket, first_bucket = _ddp_buckets(runtime, own)
    spec = RuntimeSpec(
        name=str(runtime.document.data["runtime"]),
        framework=runtime.framework,
        software=runtime.software,
        host=host,
        stack=kind(**stack),
        optimisations=own.switches(Optimisations, ("optimisations",)),
        persistence_inclusive=choice(
            runtime.document.data["persistence_inclusive"], bool, runtime.document.where("persistence_inclusive")
        ),
        ddp_bucket_bytes=bucket,
        ddp_first_bucket_bytes=first_bucket,
    )
    return spec, (*stack_constants, *host_constants)


def _stack(
    own: Reader, shared: Reader, kind: type[StackSpec] | type[CpuStackSpec]
) -> tuple[dict[str, Any], list[Constant]]:
    """What kernels reach: that of the software, but for what the runtime's own kernels do otherwise."""
    values, constants = shared.record(kind, ("stack",), "runtime.stack")
    if "stack" in own.document.data:
        names = frozenset(field.name for field in fields(kind))
        own_values, own_constants = own.record(kind, ("stack",), "runtime.stack", optional=names)
        constants = [item for item in constants if item.path.rpartition(".")[2] not in own_values] + own_constants
        values |= own_values
    return values, constants


def _host_costs(own: Reader, shared: Reader) -> tuple[HostCosts, list[Constant]]:
    names = frozenset(field.name for field in fields(HostCosts))
    values, constants = shared.record(HostCosts, ("host",), "runtime.host", optional=names)
    if "host" in own.document.data:
        own_values, own_constants = own.record(HostCosts, ("host",), "runtime.host", optional=names)
        constants = [item for item in constants if item.path.rpartition(".")[2] not in own_values] + own_constants
        values |= own_values
    needed = {field.name for field in fields(HostCosts) if field.default is MISSING}
    missing = sorted(needed - values.keys())
    if missing:
        raise InputError(f"{own.document.where('host')}: missing here and in the software: {', '.join(missing)}")
    return HostCosts(**values), constants


def _ddp_buckets(runtime: Runtime, reader: Reader) -> tuple[int, int]:
    """Bytes of DDP's buckets, which PyTorch gives in MiB."""
    document = runtime.document
    if runtime.framework != "ddp":
        if "ddp" in document.data:
            raise InputError(f"{document.where('ddp')}: given for framework {runtime.framework}; allowed: for ddp")
        return 0, 0
    section = reader.mapping(("ddp",))
    reader.known(section, dict.fromkeys(("bucket_cap_mb", "first_bucket_mb")), ("ddp",))
    sizes = []
    for name in ("bucket_cap_mb", "first_bucket_mb"):
        size = section.get(name)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= 1e6:
            problem = "is missing" if size is None else f"given {shown(size)}; allowed: MiB above zero"
            raise InputError(f"{document.where('ddp', name)}: {problem}")
        sizes.append(int(size * _MEBIBYTE))
    return sizes[0], sizes[1]
