"""ZeRO on real tensors, to be read beside `zsim.strategies`, whose hooks, switches and keys it shares.

`engine` wraps a model, `hooks` turns torch's hooks into those of `sharding`; `zero0`, `zero12` and `zero3` are the
stages, `fetch` and `gather` their parameter side, `reduce` the gradient side, `optimizer_step` what follows.
"""

from reference.sharding.engine import COMMUNICATORS, Named, ShardedModel, shard

__all__ = ["COMMUNICATORS", "Named", "ShardedModel", "shard"]
