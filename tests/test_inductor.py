"""A compiled block against Inductor itself: its scheduler counts what each fused kernel reads and writes.

The Llama block below is written in torch and lowered by torch.compile for the CPU up to the fused kernels; no code is
generated. The fusion of memory-bound work is that of GPUs but for the layout of loops.
"""

import warnings
from dataclasses import replace

import pytest
from strategy_cases import resolved

from zsim.model import build

torch = pytest.importorskip("torch", reason="torch is missing: install the package torch, `make test` does")
from torch import nn  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch.nn import functional  # noqa: E402

B, S, H, HEADS, F = 4, 128, 64, 2, 256


class Norm(nn.Module):
    """RMSNorm in fp32, as Hugging Face's Llama has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """A Llama block; cosine and sine come from outside."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(H, F, bias=False), nn.Linear(H, F, bias=False)
        self.down = nn.Linear(F, H, bias=False)

    def forward(self, x, cos, sin):
        y = self.first(x)
        q, k, v = (f(y).view(B, S, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        # The sign of the rotated half is in the sine; a CPU would not fuse the usual concatenation.
        q, k = (t * cos + t.roll(H // HEADS // 2, -1) * sin for t in (q, k))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(context.transpose(1, 2).reshape(B, S, H))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def fused_kernels():
    """(bytes, number) of the kernels that Inductor fuses, forward and backward; without extern ones and vectors."""
    found = {False: [0, 0], True: [0, 0]}

    def lower(module, inputs, **options):
        is_backward = options.get("is_backward", False)
        compile_fx.view_to_reshape(module)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(module, inputs)
        compile_fx._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode):
            compile_fx._recursive_post_grad_passes(module, is_inference=False)
            lowered = GraphLowering(module, example_inputs=inputs, is_backward=is_backward)
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*inputs)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                for node in lowered.scheduler.nodes:
                    nbytes = node.get_read_write_buffers_sizes()
                    if "Extern" not in type(node).__name__ and nbytes > 2 * B * S * H / 2:
                        found[is_backward][0] += nbytes
                        found[is_backward][1] += 1
        return lambda arguments: module.forward(*arguments)

    def boxed(module, inputs, **options):
        run = lower(module, inputs, **options)
        run._boxed_call = True
        return run

    block = Block().bfloat16()
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(S, H // HEADS, dtype=torch.bfloat16)
    compiled = torch.compile(block, backend=lambda m, i: compile_fx.compile_fx(m, i, inner_compile=boxed))
    compiled(x, table, table).sum().backward()
    return found


def test_bytes_and_kernels_of_a_llama_block(tmp_path):
    shape = {"family": "llama", "layers": 1, "hidden": H, "heads": HEADS, "ffn": F, "vocab": 512, "attention": "flash"}
    spec = resolved(tmp_path, "ddp", model=shape, precision="bf16", micro_batch=B, seq_len=S)
    block = build(replace(spec.model, compile="block"), spec.train).blocks[0].module
    theirs = fused_kernels()
    # Attention is an extern call; of its three kernels in backward one counts as that of a GEMM.
    for is_backward, phase, core_kernels in ((False, "forward", 0), (True, "backward", 2)):
        kernels = [getattr(module, phase) for module in block.in_forward_order()]
        nbytes = sum(k.nbytes for k in kernels)
        number = sum(k.num_kernels - len(k.gemms) for k in kernels) - core_kernels
        assert nbytes == pytest.approx(theirs[is_backward][0], rel=0.05)
        # A CPU sums over rows in one kernel where a GPU takes two, and here Inductor joins the sums of both norms.
        assert number == theirs[is_backward][1] + 3 * is_backward
