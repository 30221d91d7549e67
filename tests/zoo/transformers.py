"""Transformers in plain PyTorch: a BERT encoder (MiniLM-L6's shape by default) and a small ViT."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        scores = split(self.query(x)) @ split(self.key(x)).transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        mixed = scores.softmax(-1) @ split(self.value(x))
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class BertLayer(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down, self.norm2 = (
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
            nn.LayerNorm(width, eps=1e-12),
        )
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(self.act(self.up(x))))


class Bert(nn.Module):
    """Token ids and mask in, L2-normalised mean-pooled sentence embedding out."""

    def __init__(
        self,
        width: int = 384,
        heads: int = 12,
        hidden: int = 1536,
        layers: int = 6,
        vocabulary: int = 30522,
        positions: int = 512,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.types = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads, hidden) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(places) + self.types)
        keep = attention_mask.to(x.dtype)
        mask = (1.0 - keep)[:, None, None, :] * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        pooled = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1e-9)
        return nn.functional.normalize(pooled)


class VitLayer(nn.Module):
    """Pre-norm encoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(
        self, image: int = 64, patch: int = 16, width: int = 192, heads: int = 3, layers: int = 4, classes: int = 100
    ) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.layers = nn.ModuleList(VitLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.places
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y)[:, 0])
