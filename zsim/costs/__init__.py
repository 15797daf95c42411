"""What an op costs: `pricer` turns a spec into a function from op to `Work`."""

from zsim.costs.collective import link_capacities
from zsim.costs.pricing import pricer

__all__ = ["link_capacities", "pricer"]
