"""A small vision transformer that classifies images, as own code of a job."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 16
"""Height and width of the images."""


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, patch: int, dim: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (SIZE // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def reset_parameters(self) -> None:
        """Set the tensors that are not in a layer of torch.nn; each such layer has its rule."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(config: dict[str, int]) -> nn.Module:
    """Return the model. It is built without memory: its weights come from reset_parameters of each layer."""
    return VisionTransformer(**config)


def batch(columns: dict) -> dict[str, Tensor]:
    """Return a batch from some rows, whose images are raw bytes: height x width x RGB."""
    return normalised([np.frombuffer(image, np.uint8).reshape(SIZE, SIZE, 3) for image in columns["image"]], columns)


def normalised(images: list[np.ndarray], columns: dict) -> dict[str, Tensor]:
    """Return a batch from decoded images [height, width, RGB]."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return {"images": pixels.float() / 127.5 - 1, "label": columns["label"].long()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return a sum over images, their number, and how many are classified right."""
    logits = model(batch["images"]).float()
    total = F.cross_entropy(logits, batch["label"], reduction="sum")
    return total, len(batch["label"]), {"accuracy": (logits.argmax(-1) == batch["label"]).sum()}


def rows(count: int, classes: int) -> tuple[list[np.ndarray], Tensor]:
    """Return images of stripes, whose distance is their class, and labels, for a first try."""
    draw = np.random.default_rng(0)
    labels, lines = draw.integers(0, classes, count), np.arange(SIZE)
    stripes = [128 + 100 * np.sin(2 * np.pi * lines * (label + 1) / SIZE) for label in labels]
    noise = draw.normal(scale=20, size=(count, SIZE, SIZE, 3))
    images = (np.stack(stripes)[:, :, None, None] + noise).clip(0, 255).astype(np.uint8)
    return list(images), torch.from_numpy(labels)
