"""What a block of Megatron-LM costs its host: the layer of megatron-core 0.5.0, on tiny tensors of this machine's CPU.

Needs that package, which is no dependency: `pip install --no-deps --target DIR megatron-core==0.5.0`, then

    python -m benchmarks.megatron_layer DIR

Its local modules run as they are; what they call of CUDA and Apex is replaced by PyTorch's operators, one for one.
Times are those of the thread, the least of many runs, a layer out of four: forward and backward, then both under
`tensor_parallel.checkpoint`, without and with the hook of each gradient that adds into `main_grad`.
"""

import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import thread_time
from types import ModuleType
from typing import Any

import packaging
import packaging.version
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = 4
RUNS = 200
HIDDEN = 16
SHAPE = (4, 1, HIDDEN)
VIEWS = ("view", "::t", "transpose", "permute", "slice", "select", "split", "detach", "alias", "empty", "lift")


class FusedLayerNorm(torch.autograd.Function):
    """Apex' FusedLayerNormAffineFunction."""

    @staticmethod
    def forward(ctx: Any, *given_and_weights: Any) -> Any:
        """One operator."""
        given, weight, bias, shape, eps = given_and_weights
        ctx.shape = shape
        inputs = given.contiguous(), weight.contiguous(), bias.contiguous()
        normed, mean, inverse = torch.native_layer_norm(inputs[0], shape, inputs[1], inputs[2], eps)
        ctx.save_for_backward(*inputs, mean, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """One operator."""
        given, weight, bias, mean, inverse = ctx.saved_tensors
        all_three = [True, True, True]
        backward = torch.ops.aten.native_layer_norm_backward
        found = backward(gradients[0].contiguous(), given, ctx.shape, mean, inverse, weight, bias, all_three)
        return (*found, None, None)


def _module(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module


class _Anything(ModuleType):
    """A module in which every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _stand_in() -> None:
    """What the local modules import of CUDA, Apex and Transformer Engine."""
    _module("pkg_resources", packaging=packaging)
    _module("apex")
    _module("apex.normalization")
    _module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=FusedLayerNorm)
    _module(
        "scaled_upper_triang_masked_softmax_cuda",
        forward=lambda scores, _: torch.softmax(scores, -1),
        backward=lambda gradient, softmax, _: torch._softmax_backward_data(gradient, softmax, -1, softmax.dtype),  # noqa: SLF001
    )
    engine = "megatron.core.transformer.custom_layers.transformer_engine"
    sys.modules[engine] = _Anything(engine)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    generator = torch.Generator()
    torch.cuda.get_rng_state = lambda *_: generator.get_state()  # type: ignore[assignment]
    random = import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, *_: generator.set_state(state)  # type: ignore[attr-defined] # noqa: SLF001
    tracker = random.get_cuda_rng_tracker()
    tracker.states_["model-parallel-rng"] = generator.get_state()
    import_module("megatron.core.jit").jit_fuser = torch.jit.script  # type: ignore[attr-defined]


class _GlobalBuffer:
    def get_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, _name: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


def layers() -> list[torch.nn.Module]:
    """A stack of blocks of one tensor-parallel rank."""
    core = "megatron.core"
    state = import_module(f"{core}.parallel_state")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state.initialize_model_parallel(1, 1)
    state._GLOBAL_MEMORY_BUFFER = _GlobalBuffer()  # type: ignore[attr-defined] # noqa: SLF001
    softmax = import_module(f"{core}.fusions.fused_softmax")
    softmax.FusedScaleMaskSoftmax.is_kernel_available = lambda *_: True
    linear = import_module(f"{core}.tensor_parallel.layers")
    attention, mlp = import_module(f"{core}.transformer.attention"), import_module(f"{core}.transformer.mlp")
    layer = import_module(f"{core}.transformer.transformer_layer")
    spec = import_module(f"{core}.transformer.spec_utils").ModuleSpec
    norm = import_module(f"{core}.fusions.fused_layer_norm").FusedLayerNorm
    add = import_module(f"{core}.fusions.fused_bias_dropout").get_bias_dropout_add
    submodules = layer.TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=spec(
            module=attention.SelfAttention,
            params={"attn_mask_type": import_module(f"{core}.transformer.enums").AttnMaskType.causal},
            submodules=attention.SelfAttentionSubmodules(
                linear_qkv=linear.ColumnParallelLinear,
                core_attention=import_module(f"{core}.transformer.dot_product_attention").DotProductAttention,
                linear_proj=linear.RowParallelLinear,
            ),
        ),
        self_attn_bda=add,
        pre_mlp_layernorm=norm,
        mlp=spec(module=mlp.MLP, submodules=mlp.MLPSubmodules(linear.ColumnParallelLinear, linear.RowParallelLinear)),
        mlp_bda=add,
    )
    config = import_module(f"{core}.transformer.transformer_config").TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        apply_query_key_layer_scaling=False,
        persist_layer_norm=False,
    )
    return [layer.TransformerLayer(config, submodules, layer_number=i + 1) for i in range(LAYERS)]


def add_hooks(parameters: list[torch.nn.Parameter]) -> list[Any]:
    """As `DistributedDataParallel` makes them; the nodes have to be kept."""

    def hook_of(parameter: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if parameter.requires_grad:
                if parameter.grad is not None:
                    parameter.main_grad.add_(parameter.grad.data)
                parameter.grad = None

        return hook

    kept = []
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        node: Any = parameter.expand_as(parameter).grad_fn
        accumulate = node.next_functions[0][0]
        accumulate.register_hook(hook_of(parameter))
        kept.append(accumulate)
    return kept


class Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        self.found[function.name()] += 1
        return function(*args, **(kwargs or {}))

    @property
    def split(self) -> tuple[float, float]:
        """Kernels and views, a layer."""
        views = sum(count for name, count in self.found.items() if any(word in name for word in VIEWS))
        return (self.found.total() - views) / LAYERS, views / LAYERS


def forward(stack: list[torch.nn.Module], given: torch.Tensor, *, checkpoint: bool) -> torch.Tensor:
    """All layers, each by itself under a checkpoint if so wished."""
    again = import_module("megatron.core.tensor_parallel").checkpoint
    for layer in stack:

        def run(hidden: torch.Tensor, layer: torch.nn.Module = layer) -> Any:
            return layer(hidden, None)[0]

        given = again(run, False, given) if checkpoint else run(given)
    return given


def least_s(stack: list[torch.nn.Module], *, checkpoint: bool) -> tuple[float, float]:
    """Seconds a layer, forward and backward."""
    given = torch.randn(SHAPE, requires_grad=True)
    gradient = torch.ones(SHAPE)
    best = [float("inf")] * 2
    for _ in range(RUNS):
        begin = thread_time()
        output = forward(stack, given, checkpoint=checkpoint)
        middle = thread_time()
        torch.autograd.backward(output, gradient)
        best = [min(best[0], middle - begin), min(best[1], thread_time() - middle)]
    return best[0] / LAYERS, best[1] / LAYERS


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    _stand_in()
    stack = layers()
    for hooked in (False, True):
        kept = add_hooks([parameter for layer in stack for parameter in layer.parameters()]) if hooked else []
        for checkpoint in (False, True):
            each = least_s(stack, checkpoint=checkpoint)
            words = f"{'with' if kept else 'no'} hooks, {'checkpointed' if checkpoint else 'plain'}"
            sys.stdout.write(f"{words:24} {each[0] * 1e6:7.0f} us forward {each[1] * 1e6:7.0f} us backward\n")
    with Operators() as counted:
        output = forward(stack, torch.randn(SHAPE, requires_grad=True), checkpoint=False)
    sys.stdout.write("forward   {:.0f} operators with kernels on a CPU, {:.0f} views\n".format(*counted.split))
    with Operators() as counted:
        torch.autograd.backward(output, torch.ones(SHAPE))
    sys.stdout.write("backward  {:.0f} operators with kernels on a CPU, {:.0f} views\n".format(*counted.split))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
