"""The parts of a model that the loop treats differently, whatever its family calls them."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """The parts of a built model. A family finds them before FSDP2 changes the classes of modules."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    """Repeated blocks in execution order, by the model's own statement; empty if it makes none."""
    embeddings: nn.Module | None
    """Table of token vectors; None if the model reads no tokens."""
    head: nn.Module | None
    """Linear map from hidden states to logits of tokens; None if the model has none."""
    norms: tuple[nn.Module, ...]
    depth: int
    """Number of layers with attention."""
    attention_width: int
    """Number of attention heads x size of a head."""

    @property
    def vocabulary(self) -> int | None:
        """Return the number of tokens that the model has vectors for; None if it reads no tokens."""
        return None if self.embeddings is None else len(self.embeddings.get_parameter("weight"))

    @property
    def is_tied(self) -> bool:
        """Return whether embeddings and head are one parameter."""
        if self.embeddings is None or self.head is None:
            return False
        return self.embeddings.get_parameter("weight") is self.head.get_parameter("weight")
