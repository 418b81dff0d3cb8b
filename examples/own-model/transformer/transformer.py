"""The Transformer of PyTorch's FSDP2 tutorial with a causal mask, as own code of a job."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class ModelArgs:
    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.0


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads
        self.dropout_p = args.dropout_p
        self.resid_dropout = nn.Dropout(args.dropout_p)
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.part = None

    def forward(self, x: Tensor) -> Tensor:
        bsz, seq_len, _ = x.size()
        queries, keys, values = self.wq(x), self.wk(x), self.wv(x)
        queries = queries.view(bsz, seq_len, self.n_heads, self.head_dim).transpose(1, 2)
        keys = keys.view(bsz, seq_len, self.n_heads, self.head_dim).transpose(1, 2)
        values = values.view(bsz, seq_len, self.n_heads, self.head_dim).transpose(1, 2)
        if self.part is not None:  # all tokens of some heads, for some tokens of all heads
            queries, keys, values = (self.part.to_heads(x) for x in (queries, keys, values))
        dropout = self.dropout_p if self.training else 0.0
        output = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        if self.part is not None:
            output = self.part.to_sequence(output)
        return self.resid_dropout(self.wo(output.transpose(1, 2).contiguous().view(bsz, seq_len, -1)))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args.dim, hidden_dim=4 * args.dim, dropout_p=args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    _no_split_modules = ("TransformerBlock",)
    """Classes that become FSDP units; strategy.wrap_policy may choose others."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight
        self.first_part = 0

    # --8<-- [start:split]
    def split_sequence(self, part: Any) -> None:
        """Compute part number part.rank of the part.ranks parts of each sequence, if ulysses_size is above 1."""
        self.first_part = part.rank
        for layer in self.layers:
            layer.attention.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        _bsz, seq_len = tokens.size()
        start = self.first_part * seq_len
        h = self.tok_embeddings(tokens) + self.pos_embeddings(
            torch.arange(start, start + seq_len, device=tokens.device)
        )
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()

    # --8<-- [end:split]


def build(config: dict[str, int | float]) -> nn.Module:
    """Return the model. It is built without memory: its weights come from reset_parameters of each layer."""
    return Transformer(ModelArgs(**config))


def batch(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch from some rows: the inputs, and the tokens that follow them."""
    tokens = columns["tokens"].long()
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum over all tokens, and their number."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="sum"), batch["next"].numel()
