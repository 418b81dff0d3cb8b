"""A module with parts of many kinds, as own code of a job: branches, tied, frozen and repeated parts, and buffers."""

import io
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 11, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.empty(1))
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 1)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.mlp(self.norm(x)).tanh()
        return (x + self.scale * changed).view_as(x)


class Zoo(nn.Module):
    order: Tensor
    mask: Tensor
    shift: Tensor

    def __init__(self, dropout: float = 0.0, repeats: int = 2, skip: float = 0.0) -> None:
        super().__init__()
        self.repeats, self.skip = repeats, skip
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, WIDTH, (2, 1)))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.block = Block()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.cube = nn.Parameter(torch.empty(3, 2, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.places = nn.Parameter(torch.empty(WIDTH, dtype=torch.int64), requires_grad=False)
        self.register_buffer("order", torch.empty(WIDTH, dtype=torch.int64))
        self.register_buffer("mask", torch.empty(WIDTH, dtype=torch.bool))
        self.register_buffer("shift", torch.empty(WIDTH), persistent=False)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.output.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.cube, std=0.1)
        self.places.copy_(torch.arange(WIDTH))
        self.order.copy_(torch.arange(WIDTH - 1, -1, -1))
        self.mask.copy_(torch.arange(WIDTH) % 2 == 0)
        self.shift.copy_(torch.linspace(0, 1, WIDTH))

    def forward(self, tokens: Tensor, image: Tensor, branch: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))  # [B, T, WIDTH]
        seen = self.conv(image).mean((2, 3))
        seen = seen + self.shift.to(seen.dtype)
        seen = torch.where(self.mask, seen[:, self.order][:, self.places], seen + self.cube.sum((0, 1)))
        for number, one in enumerate(self.branches):
            rows = branch == number
            if rows.any():
                # Only the batch's own branches have a gradient.
                seen = seen.index_add(0, rows.nonzero()[:, 0], one(seen[rows]).to(seen.dtype))
        x = self.frozen(hidden) + self.dropout(seen).unsqueeze(1)
        for _ in range(self.repeats):
            x = x if random.random() < self.skip else self.block(x)
            # In place, on the view that a unit returns.
            x += seen.unsqueeze(1)
        logits: Tensor = self.output(x)
        return logits


def build(config: dict[str, Any]) -> nn.Module:
    return Zoo(**config)


def rows(count: int) -> dict[str, Any]:
    """Return rows of different lengths, most of which use the branches 0 and 1."""
    draw = np.random.default_rng(0)
    return {
        "tokens": [draw.integers(1, VOCAB, draw.integers(2, 9)).tolist() for _ in range(count)],
        "image": [_file(draw.normal(size=(3, 6, 5)).astype(np.float32)) for _ in range(count)],
        "name": [str(int(draw.integers(0, 20) == 0) * 2 or row % 2) for row in range(count)],
    }


def _file(values: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def batch(columns: dict[str, Any]) -> dict[str, Tensor]:
    """Return padded tokens, images from bytes, and the branch of each row."""
    tokens = nn.utils.rnn.pad_sequence(columns["tokens"], batch_first=True).long()
    device = tokens.device
    images = [np.load(io.BytesIO(one)) for one in columns["image"]]
    branch = torch.tensor([int(name) for name in columns["name"]], device=device)
    return {"tokens": tokens, "image": torch.tensor(np.stack(images), device=device), "branch": branch}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a sum over tokens, of which rows have different numbers."""
    logits = model(batch["tokens"], batch["image"], batch["branch"])
    wanted = F.pad(batch["tokens"][:, 1:], (0, 1))
    total = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=0, reduction="sum")
    trained = wanted != 0
    return total, trained.sum(), {"right": ((logits.argmax(-1) == wanted) & trained).sum(), "rows": len(wanted)}
