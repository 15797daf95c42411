"""The steps of one rank, and what becomes a measured result.

`options` are the command line of a rank, `world` its process group, `data` what it trains on, `steps` the training;
`measurement` turns what all ranks have seen into the keys of `zsim run --json`, `profile` adds a trace of torch's
profiler.
"""
