"""Ranks started, watched and ended.

`launch` starts a torchrun `agent` on each node, and agents start each `rank`. Ranks say how far they are by
`heartbeat`; `failure` finds out who failed first; `processes` sees to it that nobody is left behind; `host_memory` says
beforehand what cannot fit; `wire` reads what a node has sent from its queue, through `iproute`.
"""
