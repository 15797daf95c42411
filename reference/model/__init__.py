"""The transformer that `zsim.model` counts, as torch modules: the same modules, parameters and order of visits.

Names of modules and parameters are the simulator's. `families` has the blocks of each family, `layers` what they share,
`attention` the core between the projections, `transformer` the whole with its loss and checkpointing.
"""

from reference.model.building import build
from reference.model.transformer import Transformer

__all__ = ["Transformer", "build"]
