"""Linear layers, norms and memory-bound kernels; each count by PyTorch's eager kernels. Legend as in `model`."""

from dataclasses import replace

from zsim.model.layers import inductor
from zsim.model.layers.layer import Gradient, Layer, Reads, Step, memory_bound
from zsim.model.layers.operators import PREVIOUS, STREAM, Operator
from zsim.model.layers.shape import Shape
from zsim.model.modules import Kernels, Parameter, Tensor
from zsim.ops import Gemm


def linear(
    shape: Shape, name: str, n_in: int, n_out: int, *, bias: bool, kept_as: str = "", reads: Reads = "sibling"
) -> Layer:
    """A linear layer on T tokens; the bias is a kernel of its own unless kernels are fused or the GEMM adds it.

    Its input is kept for the gradient of the weight alone; `kept_as` names it where others keep it too.
    """
    tokens, e = shape.tokens, shape.e
    separate_bias = bias and not shape.model.fused_kernels and shape.model.compile == "none"
    kept = Tensor(kept_as or f"{name}:input", shape.tensor_bytes(n_in))
    weights = [Parameter(f"{name}.weight", n_in * n_out)]
    gradients = [Gradient(Kernels((Gemm(n_out, n_in, tokens),), 0, 1), (kept,))]
    if bias:
        weights.append(Parameter(f"{name}.bias", n_out))
        gradients.append(Gradient(Kernels((), e * tokens * n_out, 1)))
    return Layer(
        name,
        tuple(weights),
        forward=Kernels((Gemm(tokens, n_out, n_in),), 2 * e * tokens * n_out * separate_bias, 1 + separate_bias),
        to_input=Gradient(Kernels((Gemm(tokens, n_in, n_out),), 0, 1)),
        to_weights=tuple(gradients),
        operators=(
            Operator(
                (Tensor(f"{name}:output", shape.tensor_bytes(n_out)),),
                binds=(kept.name,),
                keeps=(kept.name,),
                has_weights=True,
                flattens=True,
            ),
        ),
        reads=reads,
        features=(n_in, n_out),
    )


def elementwise(
    forward_bytes: int, backward_bytes: int, forward_kernels: int, backward_kernels: int, *keeps: Tensor
) -> Step:
    """Memory-bound kernels of both directions."""
    return memory_bound((forward_bytes, forward_kernels), (backward_bytes, backward_kernels), *keeps)


def dropout(shape: Shape, name: str, num_elements: int, *, active: bool | None = None) -> Layer:
    """Reads and writes the elements and a mask of one byte; nothing when fused or switched off.

    Fused, the mask is kept all the same.
    """
    if not (shape.model.dropout if active is None else active):
        return Layer(name)
    nbytes = (2 * shape.e + 1) * num_elements * (not shape.model.fused_kernels)
    kernels = int(not shape.model.fused_kernels)
    mask = Tensor(f"{name}:mask", num_elements)
    compiled = shape.model.compile == "block"
    output = Tensor(f"{name}:output", shape.e * num_elements)
    if compiled or shape.model.fused_kernels:
        # Part of the kernel that adds the residual, which alone is written.
        operator = Operator((mask,), views=(output,), keeps=(mask.name,))
    else:
        operator = Operator((output, mask), keeps=(mask.name,))
    if compiled:
        return Layer(name).followed_by(inductor.dropped(shape, num_elements, mask).running(operator))
    return Layer(name).followed_by(elementwise(nbytes, nbytes, kernels, kernels, mask).running(operator))


def layer_norm(shape: Shape, name: str, *, bias: bool = True, continues_stream: bool = False) -> Layer:
    """LayerNorm: read and write forward; two kernels, four passes backward, of which the weights take one.

    PyTorch has it as one kernel, so torch.compile leaves its own bytes as they are. `continues_stream` where the
    residual stream goes on from its output (post-norm).
    """
    h, e, n1 = shape.model.hidden, shape.e, shape.n1
    weights = [Parameter(f"{name}.weight", h)]
    gradients = [Gradient(Kernels((), e * n1, 2))]
    if bias:
        weights.append(Parameter(f"{name}.bias", h))
        gradients.append(Gradient())
    return Layer(
        name,
        tuple(weights),
        forward=Kernels((), 2 * e * n1, 1),
        through=Gradient(keeps=(Tensor(f"{name}:input", e * n1),)),
        to_input=Gradient(Kernels((), 3 * e * n1, 1)),
        to_weights=tuple(gradients),
        operators=(_norm(shape, name, h, continues_stream=continues_stream),),
    )


def _norm(shape: Shape, name: str, width: int, *, continues_stream: bool = False) -> Operator:
    """A norm as one operator."""
    output = Tensor(f"{name}:output", shape.tensor_bytes(width))
    kept = (f"{name}:input",)
    return Operator((output,), binds=kept, keeps=kept, has_weights=True, continues_stream=continues_stream)


def rms_norm(shape: Shape, name: str, *, width: int = 0, features: int = 0, casts_product: bool = False) -> Layer:
    """RMSNorm, unfused as Hugging Face writes it: cast to fp32, square, mean, rsqrt, product, cast back, weight.

    Autograd keeps the input in fp32, and what is multiplied by the weight for the weight's gradient.

    Args:
        shape: the batch.
        name: of the module.
        width: elements a token; h unless given.
        features: elements of the weight, where it is shared by the heads; `width` unless given.
        casts_product: the product takes the input as it came and keeps it besides, as T5 does.

    """
    width = width or shape.model.hidden
    e, elements = shape.e, shape.tokens * width
    weight = Parameter(f"{name}.weight", features or width)
    forward, to_input, to_weight = _rms_kernels(shape, width)
    read = for_weight = Tensor(f"{name}:input", e * elements)
    kept: tuple[Tensor, ...] = (read,)
    operators: tuple[Operator, ...] = (_norm(shape, name, width),)
    if not shape.model.fused_kernels and shape.model.compile == "none":
        in_fp32, for_weight = Tensor(f"{name}:fp32", 4 * elements), Tensor(f"{name}:normed", e * elements)
        # Where training is in fp32 the cast returns the input itself.
        kept = (in_fp32, read) if casts_product and e < 4 else (in_fp32,)
        operators = _rms_operators(shape, name, elements, casts_product=casts_product)
    return Layer(
        name,
        (weight,),
        forward=forward,
        through=Gradient(keeps=kept),
        to_input=Gradient(to_input),
        to_weights=(Gradient(to_weight, (for_weight,)),),
        operators=operators,
    )


def _rms_operators(shape: Shape, name: str, elements: int, *, casts_product: bool) -> tuple[Operator, ...]:
    """Each operator of an eager RMSNorm; the roots of the rows, a number a token, are left out.

    The local name of the product is rebound by its cast in T5 alone.
    """
    read, in_fp32, normed = f"{name}:input", f"{name}:fp32", f"{name}:normed"
    output = Tensor(f"{name}:output", shape.e * elements)
    fp32_bytes = 4 * elements
    casts = shape.e < 4
    cast = Operator((Tensor(in_fp32, fp32_bytes),), binds=(read,)) if casts else Operator(binds=(in_fp32,))
    # Squares and their mean: backward spreads the mean's gradient, and doubles the input, in fp32.
    squares = Operator(
        (Tensor(f"{name}:squares", fp32_bytes),), reads=(in_fp32,), keeps=(in_fp32,), scratch_bytes=(fp32_bytes,) * 3
    )
    factor = read if casts_product and casts else in_fp32
    product_in_fp32 = Tensor(f"{name}:product" if casts else normed, fp32_bytes)
    product = Operator((product_in_fp32,), reads=(factor,), keeps=(factor,), scratch_bytes=(fp32_bytes,))
    back = Operator((Tensor(normed, shape.e * elements),)) if casts else None
    if not casts_product:
        product = replace(product, until=name)
    scaled = Operator(
        (output,), reads=(normed,), keeps=(normed,), has_weights=True, scratch_bytes=(shape.e * elements,)
    )
    return cast, squares, product, *((back,) if back else ()), scaled


def _rms_kernels(shape: Shape, width: int) -> tuple[Kernels, Kernels, Kernels]:
    """Forward, gradient of the input, gradient of the weight."""
    e, elements = shape.e, shape.tokens * width
    if shape.model.compile != "none":
        return (
            inductor.norm_forward(shape, width),
            inductor.norm_to_input(shape, width),
            inductor.norm_to_weight(shape, width),
        )
    if shape.model.fused_kernels:
        return Kernels((), 2 * e * elements, 1), Kernels((), 3 * e * elements, 1), Kernels((), e * elements, 2)
    # Two casts each way, none in fp32; the backward of square and mean passes over fp32 tensors again and again.
    num_casts, cast_bytes = (2, e + 4) if e < 4 else (0, 0)
    return (
        Kernels((), (2 * e + 20 + num_casts * cast_bytes) * elements, 6 + num_casts),
        Kernels((), (2 * e + 68 + num_casts * cast_bytes) * elements, 12 + num_casts),
        Kernels((), 4 * e * elements, 2),
    )


def residual(shape: Shape, name: str, *, ends_block: bool = False, flattens: bool = False, needs: str = "") -> Step:
    """Residual add forward (three passes), gradient accumulation backward.

    Fused, it takes bias, dropout and add in one pass: two reads, one write, and the mask. `ends_block` where no norm of
    the block takes the sum; `flattens` where it is one of rows of tokens and seen as a batch again. `needs`: what a
    local name holds until then.
    """
    # The sum is the code of what is around the module.
    e, n1 = shape.e, shape.n1
    added = Operator((Tensor(f"{name}:sum", e * n1),), (), (PREVIOUS, STREAM), hands_on=True, continues_stream=True)
    added = replace(added, within=name.rpartition(".")[0], flattens=flattens, needs=(needs,) if needs else ())
    if shape.model.compile == "block":
        return inductor.residual(shape, ends_block=ends_block).running(added)
    if shape.model.fused_kernels:
        return elementwise((3 * e + 1) * n1, (4 * e + 1) * n1, 1, 2).running(added)
    return elementwise(3 * e * n1, 3 * e * n1, 1, 1).running(added)


def after_residual(norm: Layer, joined: Step) -> Layer:
    """A post-norm: the sum runs in front of it, its kernels are booked behind."""
    return replace(norm.followed_by(joined), operators=(*joined.operators, *norm.operators))


def activation(shape: Shape, name: str, width: int, *, gated: bool, kept_as: str = "") -> Step:
    """GELU, ReLU or SiLU on `width` elements a token as one kernel; gated, with the product of both projections.

    Hugging Face's `gelu_new` is eight kernels and keeps three more tensors, unless kernels are fused. ReLU keeps what
    it puts out, which `kept_as` names where the next module keeps it too.
    """
    # `name` is also the module whose code calls it.
    operators = tuple(
        replace(operator, within=name)
        for operator in _activation_operators(shape, name, width, gated=gated, kept_as=kept_as)
    )
    if shape.model.compile == "block":
        return inductor.activation(shape, name, width, gated=gated, kept_as=kept_as).running(*operators)
    e, elements = shape.e, shape.tokens * width
    composed = shape.model.gelu_new and not shape.model.fused_kernels and shape.model.compile == "none"
    names = (*(("gate", "act") if gated else ()), "up", *(("half", "tanh", "one_plus") if composed else ()))
    keeps = tuple(Tensor(f"{name}:{tensor}", e * elements) for tensor in names)
    if kept_as:
        keeps = (Tensor(kept_as, e * elements),)
    if gated and shape.model.fused_kernels:
        return elementwise(3 * e * elements, 5 * e * elements, 1, 1, *keeps).running(*operators)
    single = (18, 28, 8, 11) if composed else (2, 3, 1, 1)
    product = (3, 6, 1, 2) if gated else (0, 0, 0, 0)
    forward, backward, forward_kernels, backward_kernels = map(sum, zip(single, product, strict=True))
    nbytes = (forward * e * elements, backward * e * elements)
    return elementwise(*nbytes, forward_kernels, backward_kernels, *keeps).running(*operators)


def _activation_operators(shape: Shape, name: str, width: int, *, gated: bool, kept_as: str) -> tuple[Operator, ...]:
    nbytes = shape.tensor_bytes(width)
    up = f"{name}:up"
    output = Tensor(kept_as or f"{name}:activated", nbytes)
    fused = shape.model.fused_kernels or shape.model.compile == "block"
    if gated and fused:
        made = (Tensor(f"{name}:act", nbytes),) if shape.model.compile == "none" else ()
        kept = (f"{name}:gate", up, *(tensor.name for tensor in made))
        return (Operator((output, *made), reads=(f"{name}:gate", PREVIOUS), binds=("", up), keeps=kept),)
    if gated:
        # The activation itself runs in front of the other projection: `gate_activation`.
        return (Operator((output,), reads=(f"{name}:act", PREVIOUS), binds=("", up), keeps=(f"{name}:act", up)),)
    if shape.model.gelu_new and shape.model.compile == "none" and not fused:
        return (Operator(binds=(up,)), *_composed_gelu(name, up, output))
    return (Operator((output,), binds=(up,), keeps=(kept_as or up,)),)


def gate_activation(shape: Shape, layer: Layer, name: str, width: int) -> Layer:
    """The activation of the gate as its own operator; its kernel is booked with the product (`activation`)."""
    if shape.model.fused_kernels or shape.model.compile == "block":
        return layer
    gate, nbytes = f"{name}:gate", shape.tensor_bytes(width)
    act = Tensor(f"{name}:act", nbytes)
    operators: tuple[Operator, ...] = (Operator((act,), reads=(gate,), keeps=(gate,)),)
    if shape.model.gelu_new and shape.model.compile == "none":
        operators = _composed_gelu(name, gate, act)
    kept = {kept: Tensor(kept, nbytes) for operator in operators for kept in operator.keeps}
    return replace(layer, through=layer.through + Gradient(keeps=tuple(kept.values()))).running(*operators)


def _composed_gelu(name: str, source: str, output: Tensor) -> tuple[Operator, ...]:
    """0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), operator by operator (transformers, NewGELUActivation)."""

    def tensor(what: str) -> Tensor:
        return Tensor(f"{name}:{what}", nbytes)

    nbytes = output.nbytes
    half, tanh, one_plus, cube, part, inner, scaled = (
        f"{name}:{what}" for what in ("half", "tanh", "one_plus", "cube", "part", "inner", "scaled")
    )
    return (
        Operator((tensor("half"),), reads=(source,)),
        Operator((tensor("cube"),), reads=(source,), keeps=(source,), scratch_bytes=(nbytes, nbytes)),
        Operator((tensor("part"),), reads=(cube,)),
        Operator((tensor("inner"),), reads=(source, part), hands_on=True),
        Operator((tensor("scaled"),), reads=(inner,)),
        Operator((tensor("tanh"),), reads=(scaled,), keeps=(tanh,)),
        Operator((tensor("one_plus"),), reads=(tanh,), hands_on=True),
        Operator((output,), reads=(half, one_plus), keeps=(half, one_plus), needs=(source,)),
    )


def shared_input(shape: Shape, layer: Layer, num_readers: int) -> Layer:
    """The first of several modules that read one input: each further one's gradient of it is added."""
    extra = num_readers - 1
    added = Gradient(Kernels((), 3 * shape.e * shape.n1 * extra, extra))
    if shape.model.compile == "block":
        added = Gradient(inductor.shared_input(shape, num_readers))
    return replace(layer, to_input=layer.to_input + added)
