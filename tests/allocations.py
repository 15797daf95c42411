"""What PyTorch allocates while it trains: each tensor with what is allocated then, as its profiler records it."""

import json
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

BACKWARD = "BACKWARD"


class Allocation(NamedTuple):
    """One tensor more, and all that is allocated then; the beginning of backward is one of no bytes."""

    nbytes: int
    live_bytes: int


def train(model, ids, path, least, **inputs):
    """Allocations of a step of one model from `least` bytes on, in order, without gradients of parameters.

    Logits are let go of as a training loop does it that holds them until the decoder's backward.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        outputs = model(input_ids=ids, labels=ids, **inputs)
        loss, held = outputs.loss, [outputs]
        _decoder_node(outputs.logits).register_hook(lambda *_: held.clear())
        del outputs
        with record_function(BACKWARD):
            pass
        loss.backward()
    profiled.export_chrome_trace(str(path))
    weights = {p.numel() * p.element_size() for p in model.parameters() if p.dim() > 1}
    return list(_allocations(json.loads(path.read_text())["traceEvents"], least, weights))


def _decoder_node(logits):
    node = logits.grad_fn
    while "mm" not in node.name().lower():
        node = node.next_functions[0][0]
    return node


def _allocations(events, least, weights):
    (backward,) = (event["ts"] for event in events if event.get("name") == BACKWARD and event.get("ph") == "X")
    sizes, live, begun = {}, 0, False
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        if event["ts"] > backward and not begun:
            begun = True
            yield Allocation(0, live)
        nbytes, address = event["args"]["Bytes"], event["args"]["Addr"]
        if nbytes < 0:
            live -= sizes.pop(address, 0)
        elif nbytes >= least and nbytes not in weights:
            sizes[address] = nbytes
            live += nbytes
            yield Allocation(nbytes, live)
