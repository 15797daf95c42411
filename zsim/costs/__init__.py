"""What an op costs: `pricer` turns a spec into a function from op to `Work`."""

from zsim.costs.pricing import link_capacities, pricer, products_and_all_s

__all__ = ["link_capacities", "pricer", "products_and_all_s"]
