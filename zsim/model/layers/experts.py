"""Mixture of experts: router and fused expert tensors as Hugging Face holds them. Legend as in `model`.

S = T·k pairs of a token and one of its k experts. The kernels are those of `grouped_mm_experts_forward` (transformers
5.24, integrations/moe.py): sort the pairs by expert, gather their rows, one grouped GEMM for gate and up, one for down,
weigh, put back and sum. Leaves out: unequal load of the experts, the auxiliary loss of the router, its jitter, and that
Mixtral weighs in fp32.
"""

from zsim.model.layers.dense import elementwise
from zsim.model.layers.layer import Gradient, Layer
from zsim.model.layers.operators import INPUT, Operator, Operators
from zsim.model.layers.shape import Shape
from zsim.model.modules import Kernels, Parameter, Tensor
from zsim.model_spec import ExpertsSpec
from zsim.ops import Gemm

_INDEX_KERNELS = 9
"""On S integers: sort (two passes), token of a pair, cast and histogram, offsets, weights, inverse order (two)."""


def router(shape: Shape, name: str, experts: ExpertsSpec) -> Layer:
    """Logits, softmax in fp32, the k largest and their sum; the module itself holds the weight."""
    h, tokens, e = shape.model.hidden, shape.tokens, shape.e
    n = experts.number
    logits = tokens * n
    read, kept = f"{name}:input", Tensor(f"{name}:probabilities", 4 * logits)
    picked = elementwise((e + 4) * logits + 12 * logits, (e + 4) * logits + 20 * logits, 5, 11, kept)
    return Layer(
        name,
        (Parameter(f"{name}.weight", n * h),),
        forward=Kernels((Gemm(tokens, n, h),), 0, 1),
        to_input=Gradient(Kernels((Gemm(tokens, h, n),), 0, 1)),
        to_weights=(Gradient(Kernels((Gemm(n, h, tokens),), 0, 1), (Tensor(read, shape.tensor_bytes(h)),)),),
        operators=(
            Operator(
                (Tensor(f"{name}:logits", e * logits),), binds=(read,), keeps=(read,), has_weights=True, flattens=True
            ),
            Operator((kept,), keeps=(kept.name,)),
        ),
    ).followed_by(picked)


def experts_layer(shape: Shape, name: str, experts: ExpertsSpec, matrices: tuple[tuple[str, int], ...]) -> Layer:
    """All experts of a block.

    Args:
        shape: the batch.
        name: of the module.
        experts: how many, how wide, how many a token.
        matrices: name of each parameter and its share of the three matrices gate, up and down; the last is down.

    """
    h, f, e = shape.model.hidden, experts.ffn, shape.e
    pairs = shape.tokens * experts.per_token
    matrix = experts.number * f * h
    inactive = experts.number - experts.per_token
    parameters = tuple(
        Parameter(f"{name}.{tensor}", count * matrix, inactive=count * inactive * f * h) for tensor, count in matrices
    )
    rows, inner, token_rows = e * pairs * h, e * pairs * f, e * shape.n1
    up, down = _grouped(pairs, 2 * f, h, experts), _grouped(pairs, h, f, experts)
    down_input, up_input = _grouped(pairs, f, h, experts), _grouped(pairs, h, 2 * f, experts)
    gathered, product = Tensor(f"{name}:rows", rows), Tensor(f"{name}:product", inner)
    kept = (Tensor(f"{name}:gate_up", 2 * inner), Tensor(f"{name}:act", inner), Tensor(f"{name}:down", rows))
    return Layer(
        name,
        parameters,
        forward=Kernels(
            up + down,
            # Gather, weigh, put back: a read and a write each; the sum; SiLU and product.
            7 * rows + token_rows + 5 * inner,
            _INDEX_KERNELS + 6 + len(up + down),
        ),
        through=Gradient(
            # Spread, put back (zeros, sort, scatter), weigh (two products and a sum), the weights themselves (three);
            # product (two), SiLU, concatenation.
            Kernels(down_input, 12 * rows + 13 * inner, 14 + len(down_input)),
            kept,
        ),
        # Zeros, sort and scatter of the gathered rows.
        to_input=Gradient(Kernels(up_input, 3 * rows + token_rows, 3 + len(up_input))),
        to_weights=(
            *(_to_weight(pairs, count * f, h, experts, gathered) for _, count in matrices[:-1]),
            _to_weight(pairs, h, f, experts, product),
        ),
        children=(Layer(f"{name}.act_fn"),),
        operators=_expert_operators(name, rows, inner, token_rows),
    )


def _expert_operators(name: str, rows: int, inner: int, token_rows: int) -> Operators:
    """Sizes in bytes: of the pairs' rows, of what is between gate and down, of the tokens' rows."""

    def made(what: str, nbytes: int) -> tuple[Tensor, ...]:
        return (Tensor(f"{name}:{what}", nbytes),)

    def kept(*what: str) -> tuple[str, ...]:
        return tuple(f"{name}:{part}" for part in what)

    gathered = Operator(made("rows", rows), reads=(INPUT,))
    halves = Operator(views=(*made("gate", inner), *made("up", inner)))
    activated = Operator(made("act", inner), reads=kept("gate"), keeps=kept("gate_up"))
    product = Operator(made("product", inner), reads=kept("act", "up"), keeps=kept("act", "gate_up"))
    return (
        gathered,
        Operator(made("gate_up", 2 * inner), keeps=kept("rows"), has_weights=True),
        halves,
        activated,
        product,
        Operator(made("down", rows), keeps=kept("product")),
        Operator(made("weighted", rows), keeps=kept("down")),
        Operator(made("restored", rows)),
        Operator(made("output", token_rows)),
    )


def _grouped(pairs: int, n: int, k: int, experts: ExpertsSpec) -> tuple[Gemm, ...]:
    """Rows of each expert times its matrix; what does not divide evenly gives some experts one row more."""
    return tuple(Gemm(rows, n, k, batch) for rows, batch in _load(pairs, experts))


def _to_weight(pairs: int, m: int, n: int, experts: ExpertsSpec, kept: Tensor) -> Gradient:
    """The gradient of each expert's matrix, summed over its rows."""
    gemms = tuple(Gemm(m, n, rows, batch) for rows, batch in _load(pairs, experts))
    return Gradient(Kernels(gemms, 0, len(gemms)), (kept,))


def _load(pairs: int, experts: ExpertsSpec) -> list[tuple[int, int]]:
    """(rows, experts with so many), spread as evenly as whole rows allow."""
    rows, more = divmod(pairs, experts.number)
    return [(n, batch) for n, batch in ((rows + 1, more), (rows, experts.number - more)) if n and batch]
