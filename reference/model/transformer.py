"""Embedding, blocks, head and loss; which blocks run forward again in backward."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference.model.attention import Positions, positions
from reference.model.bert import BertHead
from reference.model.layers import Embeddings, Head
from zsim.model_spec import ModelSpec

RENAMED = {"lm_head.final_norm": "final_norm", "lm_head.decoder.bias": "lm_head.bias"}
"""What the simulator names otherwise than by its place in the tree of modules."""


class Transformer(nn.Module):
    """A model that returns its loss.

    Attributes:
        embeddings: words and positions.
        layer: the blocks.
        lm_head: what is behind them, with the loss.

    """

    def __init__(
        self,
        model: ModelSpec,
        blocks: list[nn.Module],
        head: Head | BertHead,
        *,
        recomputed: list[bool],
        reentrant: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.embeddings = Embeddings(model)
        self.layer = nn.ModuleList(blocks)
        self.lm_head = head
        self._recomputed = recomputed
        self._reentrant = reentrant
        self._positions: tuple[tuple[int, torch.dtype, torch.device], Positions] | None = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Tokens and labels, int64 [b, s] -> mean cross entropy over all tokens, a scalar in fp32."""
        hidden: Tensor = self.embeddings(tokens)
        at = self._positions_of(hidden)
        for block, recomputed in zip(self.layer, self._recomputed, strict=True):
            if recomputed and torch.is_grad_enabled():
                hidden = self._checkpointed(block, hidden, at)
            else:
                hidden = block(hidden, at)
        loss: Tensor = self.lm_head(hidden, labels)
        return loss

    def _checkpointed(self, block: nn.Module, hidden: Tensor, at: Positions) -> Tensor:
        if self._reentrant and not hidden.requires_grad:
            # The reentrant kind builds no graph for weights below an input without a gradient.
            hidden = hidden.detach().requires_grad_()
        # Without dropout nothing in a block draws random numbers.
        output: Tensor = checkpoint(block, hidden, at, use_reentrant=self._reentrant, preserve_rng_state=False)
        return output

    def _positions_of(self, hidden: Tensor) -> Positions:
        """Kept from call to call: they depend on the shape alone."""
        key = (hidden.shape[1], hidden.dtype, hidden.device)
        if self._positions is None or self._positions[0] != key:
            self._positions = (key, positions(self.model, key[0], dtype=key[1], device=key[2]))
        return self._positions[1]

    def modules_by_name(self) -> dict[str, tuple[int, nn.Module]]:
        """The simulator's name -> (layer, module), in the order in which forward enters them.

        The layer is -1 for the embeddings, the number of blocks for the head.
        """
        roots: list[tuple[int, str, nn.Module]] = [(-1, "embeddings", self.embeddings)]
        roots += [(index, f"layer.{index}", block) for index, block in enumerate(self.layer)]
        roots += [(len(self.layer), "lm_head", self.lm_head)]
        return {
            RENAMED.get(name, name): (layer, module)
            for layer, prefix, root in roots
            for name, module in root.named_modules(prefix=prefix)
        }

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The simulator's name -> parameter, in order of construction; tied weights once."""
        return dict(self._named_parameters())

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in self.named_parameters():
            module, _, leaf = path.rpartition(".")
            yield RENAMED.get(path, f"{RENAMED.get(module, module)}.{leaf}"), parameter
