"""Records of numbers with an origin: `{value: "1555 GB/s", origin: datasheet, source: ..., range: [..]}` -> `spec`.

One reader for topologies, devices and runtimes. The fields of the target dataclass say what has to be there; nothing
has a default, and every number that is read leaves a `Constant` behind. A number may depend on the software
generation (`by_software: {"2021": {...}}`) or on the GPU generation (`by_generation: {ampere: {...}}`).
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from zsim import units
from zsim.reading.documents import Document, InputError, Keys, nearest
from zsim.spec import ClusterSpec, Constant, Origin, Spec
from zsim.units import shown

Record = TypeVar("Record")

_NUMBER_KEYS: Final = ("value", "origin", "source", "range")
_SWITCHES: Final = ("by_software", "by_generation")

_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "memory_bytes": (2.0**20, 1e15),
    "context_bytes": (1, 1e15),
    "num_sms": (1, 100_000),
    # Libraries halve a tile up to three times.
    "tile_m": (8, 4096),
    "tile_n": (8, 4096),
    "chip_spread": (0, 0.5),
    "clock_share": (0.1, 1.5),
    "gemm_efficiency": (0.01, 1),
    "attention_efficiency": (0.01, 1),
    "gemm_prologue": (0, 100_000),
    "memory_efficiency": (0.01, 1),
    "tile_halving_efficiency": (0.1, 1),
    "misaligned_slowdown": (1, 100),
    "compute_share": (0, 0.9),
    "launch_queue_depth": (1, 1_000_000),
    "nics_per_node": (1, 1024),
    "channels_intra": (1, 1024),
    "channels_inter": (1, 1024),
    "hop_latency_s": (0, 0.1),
    "trips_above_eager": (1, 100),
    "host_slowdown": (0.01, 1000),
    "line_share": (0.01, 1),
    "wire_bytes_ratio": (1, 100),
}
"""Field of the spec -> lowest and highest value that makes sense, in SI units, where its dimension says too little.

A share is at most one: nothing runs above the peak of a data sheet.
"""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads records of one document into fields of the spec."""

    document: Document
    software: str
    """Chooses among `by_software`."""
    generation: str
    """Chooses among `by_generation`."""

    def mapping(self, keys: Keys) -> dict[str, Any]:
        """A section that has to be there."""
        value: Any = self.document.data
        for depth, key in enumerate(keys, start=1):
            if not isinstance(value, dict) or key not in value:
                raise InputError(f"{self.document.where(*keys[:depth])} is missing")
            value = value[key]
        if not isinstance(value, dict):
            raise InputError(f"{self.document.where(*keys)}: given {shown(value)}; allowed: a mapping")
        return value

    def record(
        self,
        target: type,
        keys: Keys,
        prefix: str,
        *,
        optional: frozenset[str] = frozenset(),
        section: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], list[Constant]]:
        """The fields of dataclass `target` found under `keys`, and the constants at `prefix`.

        `optional` fields may be absent because they are read elsewhere; all others are errors if absent. `section` is
        the mapping at `keys` without the entries that are not fields.
        """
        given = self.mapping(keys) if section is None else section
        hints = get_type_hints(target)
        self.known(given, hints, keys)
        values: dict[str, Any] = {}
        constants: list[Constant] = []
        for name, hint in hints.items():
            if name not in given:
                if name not in optional and name not in _defaulted(target):
                    raise InputError(f"{self.document.where(*keys, name)} is missing")
            elif is_dataclass(hint):
                assert isinstance(hint, type)
                inner, found = self.record(hint, (*keys, name), f"{prefix}.{name}")
                values[name] = hint(**inner)
                constants += found
            elif hint in {int, float}:
                constant = self.number(given[name], (*keys, name), f"{prefix}.{name}", integral=hint is int)
                values[name] = int(constant.value) if hint is int else constant.value
                constants.append(constant)
            else:
                values[name] = choice(
                    self._switched(given[name], (*keys, name))[0], hint, self.document.where(*keys, name)
                )
        return values, constants

    def switches(self, target: type[Record], keys: Keys) -> Record:
        """A record of plain words and numbers that are choices, not constants; all of its fields have to be there."""
        given = self.mapping(keys)
        hints = get_type_hints(target)
        self.known(given, hints, keys)
        for name in hints:
            if name not in given and name not in _defaulted(target):
                raise InputError(f"{self.document.where(*keys, name)} is missing")
        return target(**{n: choice(given[n], hints[n], self.document.where(*keys, n)) for n in given})

    def number(self, node: Any, keys: Keys, path: str, *, integral: bool = False) -> Constant:
        """One number with its origin; the dimension follows from the name of the field at the end of `path`."""
        node, keys = self._switched(node, keys)
        where = self.document.where(*keys)
        if not isinstance(node, dict):
            raise InputError(f"{where}: given {shown(node)} alone; allowed: a mapping of {', '.join(_NUMBER_KEYS)}")
        self.known(node, dict.fromkeys(_NUMBER_KEYS), keys)
        for needed in ("value", "origin", "source"):
            if node.get(needed) is None:
                raise InputError(f"{self.document.where(*keys, needed)} is missing")
        origin: Origin = choice(node["origin"], Origin, self.document.where(*keys, "origin"))
        source = choice(node["source"], str, self.document.where(*keys, "source"))
        dimension = units.dimension_of(path)
        value = units.parse(node["value"], dimension, self.document.where(*keys, "value"))
        if integral and not (value.is_integer() and value >= 1):
            raise InputError(f"{self.document.where(*keys, 'value')}: given {value:g}; allowed: a whole number from 1")
        lowest, highest = _limits(path)
        if not lowest <= value <= highest:
            place, allowed = self.document.where(*keys, "value"), units.between(lowest, highest, dimension)
            raise InputError(f"{place}: {shown(node['value'])} is out of range; allowed: {allowed}")
        low, high = self._range(node, value, origin, keys, dimension)
        return Constant(path, value, dimension, origin, source, low, high)

    def known(self, given: Mapping[str, Any], allowed: Mapping[str, Any], keys: Keys) -> None:
        """Refuse unknown keys, naming the nearest known one."""
        for name in given:
            if name not in allowed:
                raise InputError(f"{self.document.where(*keys, name)}: unknown key; {nearest(name, allowed)}")

    def _switched(self, node: Any, keys: Keys) -> tuple[Any, Keys]:
        """Follow `by_software` and `by_generation` to the entry that applies."""
        while isinstance(node, dict) and (switch := next((name for name in _SWITCHES if name in node), None)):
            self.known(node, {switch: None}, keys)
            keys = (*keys, switch)
            wanted = self.software if switch == "by_software" else self.generation
            entries = node[switch]
            if not isinstance(entries, dict) or wanted not in entries:
                given = ", ".join(entries) if isinstance(entries, dict) else shown(entries)
                what = "software" if switch == "by_software" else "GPU generation"
                raise InputError(f"{self.document.where(*keys)}: no entry for {what} {wanted!a}; given: {given}")
            node, keys = entries[wanted], (*keys, wanted)
        return node, keys

    def _range(
        self, node: dict[str, Any], value: float, origin: Origin, keys: Keys, dimension: units.Dimension
    ) -> tuple[float, float]:
        where = self.document.where(*keys, "range")
        bounds = node.get("range")
        if bounds is None:
            if origin == "assumed":
                raise InputError(f"{where} is missing; an assumed number needs one")
            return value, value
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise InputError(f"{where}: given {shown(bounds)}; allowed: [lowest, highest]")
        low, high = (units.parse(bound, dimension, where) for bound in bounds)
        if not low <= value <= high:
            raise InputError(f"{where}: {shown(bounds)} does not enclose the value {value:g}")
        return low, high


def _limits(path: str) -> tuple[float, float]:
    return _LIMITS.get(path.rpartition(".")[2], (0.0, math.inf))


def choice(given: Any, hint: Any, where: str) -> Any:
    """A word, a switch or a plain whole number, as the type of a field allows it."""
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if given not in allowed or isinstance(given, bool):
            hints = nearest(given, allowed) if isinstance(given, str) else f"allowed: {', '.join(map(str, allowed))}"
            raise InputError(f"{where}: given {shown(given)}; {hints}")
    elif hint is bool:
        if not isinstance(given, bool):
            raise InputError(f"{where}: given {shown(given)}; allowed: true or false")
    elif hint is int:
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 10**6:
            raise InputError(f"{where}: given {shown(given)}; allowed: a whole number from 0 to 1,000,000")
    elif not isinstance(given, str) or not given:
        raise InputError(f"{where}: given {shown(given)}; allowed: text")
    return given


def with_constant(spec: Spec, path: str, value: float) -> Spec:
    """The spec with one of its constants set to another value, for studies of sensitivity.

    `path` is that of a `Constant` of the spec; whole numbers are rounded, and what would be impossible, such as an
    efficiency above one, stops at what is possible.
    """
    if path not in {constant.path for constant in spec.constants}:
        raise InputError(f"{path}: no constant of this experiment; {nearest(path, (c.path for c in spec.constants))}")
    lowest, highest = _limits(path)
    value = min(max(value, lowest), highest)
    changed: Spec = replaced(spec, path.split("."), value)
    constants = tuple(
        replace(constant, value=value) if constant.path == path else constant for constant in spec.constants
    )
    return replace(changed, constants=constants)


def with_node_bandwidth(spec: Spec, bytes_per_s: float) -> Spec:
    """The spec with NICs of another speed, for studies of what bandwidth is needed.

    What is achieved keeps its share of the nominal bandwidth, and a channel of NCCL's graph its share of a NIC. The
    number of NICs, PCIe and latencies stay. Left out: NCCL rounds the speed of a channel down to one of a short list.

    Args:
        spec: a resolved experiment.
        bytes_per_s: nominal, of all NICs of a node together, one way; above 0.

    """
    if not isinstance(spec.cluster, ClusterSpec):
        raise InputError(f"{spec.cluster.topology} has no NICs; allowed: a topology of GPUs, or cluster.link_rate")
    network = spec.cluster.network
    factor = bytes_per_s / (network.nics_per_node * network.nic_bytes_per_s)
    names = ("nic_bytes_per_s", "inter_bus_bytes_per_s", "channel_inter_bytes_per_s")
    scaled = replace(network, **{name: getattr(network, name) * factor for name in names})
    paths = {f"cluster.network.{name}" for name in names}
    constants = tuple(_scaled(constant, factor) if constant.path in paths else constant for constant in spec.constants)
    return replace(spec, cluster=replace(spec.cluster, network=scaled), constants=constants)


def _scaled(constant: Constant, factor: float) -> Constant:
    value, low, high = (number * factor for number in (constant.value, constant.low, constant.high))
    source = f"{constant.source}; times {factor:.4g}"
    return replace(constant, value=value, low=low, high=high, origin="derived", source=source)


def replaced(record: Any, names: list[str], value: float) -> Any:
    """A record within which one number, named by the fields that lead to it, has another value."""
    assert is_dataclass(record), names
    assert not isinstance(record, type)
    name, *rest = names
    if rest:
        new: Any = replaced(getattr(record, name), rest, value)
    else:
        new = max(1, round(value)) if get_type_hints(type(record))[name] is int else value
    return replace(record, **{name: new})


def _defaulted(target: type) -> frozenset[str]:
    """Fields whose dataclass gives a default."""
    return frozenset(item.name for item in fields(target) if item.default is not MISSING)
