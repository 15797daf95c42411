"""Questions that take more than one run, each answered by a record of `findings`; the runs are spread over processes.

from zsim.studies import Source, required_bandwidth
need = required_bandwidth([Source("experiments/roberta_10b_p4d_after.yaml")])
need.curves[0].required_bytes_per_s[0.05]
"""

from zsim.studies.ablation import LADDER, Change, ablation, changes
from zsim.studies.bandwidth import required_bandwidth
from zsim.studies.contrasts import contrast, memory_by_stage, scaling
from zsim.studies.fit_maps import fit_map
from zsim.studies.flushes import flush_risk, micro_batch_limits
from zsim.studies.runs import Source
from zsim.studies.stragglers import emptying_caches, straggling

__all__ = [
    "LADDER",
    "Change",
    "Source",
    "ablation",
    "changes",
    "contrast",
    "emptying_caches",
    "fit_map",
    "flush_risk",
    "memory_by_stage",
    "micro_batch_limits",
    "required_bandwidth",
    "scaling",
    "straggling",
]
