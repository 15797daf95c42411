"""The symbols of the formulas, for one model and one batch."""

from dataclasses import dataclass

from zsim.model_spec import ModelSpec
from zsim.spec import TrainSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """The symbols of `model`'s legend."""

    model: ModelSpec
    train: TrainSpec

    @property
    def e(self) -> int:
        """Bytes of an activation element."""
        return self.train.element_bytes

    @property
    def tokens(self) -> int:
        """T = b·s."""
        return self.train.micro_batch * self.train.seq_len

    @property
    def n1(self) -> int:
        """Elements of a hidden state."""
        return self.tokens * self.model.hidden

    @property
    def n2(self) -> int:
        """Elements of the attention scores."""
        return self.train.micro_batch * self.model.heads * self.train.seq_len**2

    @property
    def query_width(self) -> int:
        """Queries of all heads of one token."""
        return self.model.heads * self.model.head_dim

    @property
    def kv_width(self) -> int:
        """Keys of all key/value heads of one token."""
        return self.model.kv_heads * self.model.head_dim

    def tensor_bytes(self, width: int) -> int:
        """An activation of so many elements a token."""
        return self.e * self.tokens * width
