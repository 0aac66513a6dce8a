"""The model of the benchmarks: a plain Llama-like decoder that knows of no engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int


SHAPES = {
    "tiny": Shape(vocabulary=256, hidden=64, inner=192, layers=3, heads=2),
    "36m": Shape(vocabulary=8192, hidden=512, inner=1536, layers=8, heads=8),
    "100m": Shape(vocabulary=9728, hidden=768, inner=2048, layers=12, heads=12),
    "150m": Shape(vocabulary=8192, hidden=1024, inner=3072, layers=10, heads=16),
}


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, shape.inner, bias=False)
        self.up = nn.Linear(hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, length, hidden)
        h = self.attention_norm(x)
        q, k, v = (  # each (batch, heads, length, hidden / heads)
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Decoder(nn.Module):
    """tokens (batch, length) -> mean next-token loss (scalar)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.width = shape.hidden // shape.heads
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        place = torch.arange(inputs.shape[1], device=tokens.device)
        turns = 10_000.0 ** (-torch.arange(0, self.width, 2, device=tokens.device) / self.width)
        angle = torch.outer(place, turns)  # (length, width / 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(name: str, seed: int = 0) -> Decoder:
    """The same weights on every rank and for every engine."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(SHAPES[name])
