"""What an op costs: `pricer` turns a spec into a function from op to `Work`."""

from zsim.costs.pricing import pricer

__all__ = ["pricer"]
