"""Exposed communication against the bandwidth of a node, and the bandwidth that hides enough of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

BITS_PER_BYTE = 8
GIGA = 1e9


class BandwidthPoint(NamedTuple):
    """One experiment with NICs of another speed."""

    bytes_per_s: float
    """Nominal, of all NICs of a node together, one way."""
    exposed_share: float
    """Of the step: communication that no compute covers."""
    step_s: float


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """One experiment over a range of NICs."""

    label: str
    points: tuple[BandwidthPoint, ...]
    """In rising order of bandwidth."""
    required_bytes_per_s: Mapping[float, float | None]
    """By largest allowed share: the smallest simulated bandwidth from which on the share stays below it; None where no
    bandwidth up to `limit_bytes_per_s` is enough."""
    present: BandwidthPoint
    """The experiment as it is."""
    limit_bytes_per_s: float
    """Where faster NICs bring nothing more, for the GPUs' own PCIe links carry no more."""

    def lines(self) -> list[str]:
        """The answer in words: as it is, each threshold, and what remains."""
        least = min(point.exposed_share for point in self.points)
        now = f"{self.present.exposed_share:.1%} of the step with {gbit_per_s(self.present.bytes_per_s)} per node"
        return [
            f"{self.label}: exposed communication {now}",
            *(f"  below {share:.0%} {self.need(share)}" for share in sorted(self.required_bytes_per_s, reverse=True)),
            f"  {least:.1%} at best, up to {gbit_per_s(self.limit_bytes_per_s)} that the GPUs' PCIe links carry",
        ]

    def need(self, share: float) -> str:
        """Of one threshold."""
        needed = self.required_bytes_per_s[share]
        return "never" if needed is None else f"from {gbit_per_s(needed)} per node"


@dataclass(frozen=True, slots=True)
class BandwidthNeed:
    """Experiments side by side."""

    shared: str
    curves: tuple[BandwidthCurve, ...]

    @property
    def headline(self) -> str:
        """What the strictest threshold that can be met asks of the first experiment, or of each of two."""
        shares = [share for share, _ in sorted(self.curves[0].required_bytes_per_s.items()) if self._met(share)]
        if not shares:
            least = min(point.exposed_share for curve in self.curves for point in curve.points)
            return f"No bandwidth hides enough: at least {least:.0%} of the step stay exposed communication"
        share = shares[0]
        if len(self.curves) == 1:
            (curve,) = self.curves
            now = f"{curve.present.exposed_share:.1%} at the present {gbit_per_s(curve.present.bytes_per_s)}"
            return f"Exposed communication is below {share:.0%} {curve.need(share)}; {now}"
        needs = "; ".join(f"{curve.label} {curve.need(share)}" for curve in self.curves[:2])
        return f"Exposed communication below {share:.0%}: {needs}"

    def _met(self, share: float) -> bool:
        return any(curve.required_bytes_per_s[share] is not None for curve in self.curves)


def gbit_per_s(bytes_per_s: float) -> str:
    """As network people write it, three digits."""
    value = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{value:,.0f} Gbit/s" if value >= 100 else f"{value:.3g} Gbit/s"
