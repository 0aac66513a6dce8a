"""The model of the benchmarks: a plain Llama-like decoder that knows nothing about engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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


def shape_of(name: str) -> Shape:
    """One of `SHAPES`, or WIDTHxLAYERS, such as "512x8"."""
    if name in SHAPES:
        return SHAPES[name]
    hidden, _, layers = name.partition("x")
    width = int(hidden)
    return Shape(vocabulary=8192, hidden=width, inner=3 * width, layers=int(layers), heads=max(1, width // 64))


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter (arXiv 2106.09685) of rank 8."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)  # not zero, so that each step changes both

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


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


class Group(nn.ModuleList):
    """Blocks that are gathered together."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self:
            x = block(x, cos, sin)
        return x


class Decoder(nn.Module):
    """tokens (batch, length) -> mean next-token loss (scalar).

    Args:
        checkpointed: compute each layer again in backward (non-reentrant).
        together: so many blocks are a layer, the unit that engines gather.
    """

    def __init__(self, shape: Shape, checkpointed: bool = False, together: int = 1) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        blocks = [Block(shape) for _ in range(shape.layers)]
        groups = [blocks[i : i + together] for i in range(0, len(blocks), together)]
        self.layers = nn.ModuleList(blocks if together == 1 else map(Group, groups))
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
            if self.checkpointed:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(name: str, seed: int = 0, case: str = "full", together: int = 1) -> Decoder:
    """The same weights on every rank and for every engine.

    Args:
        case: "full", "lora" (adapters on a frozen base) or "checkpointed".
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Decoder(shape_of(name), case == "checkpointed", together)
        if case == "lora":
            model.requires_grad_(False)
            for block in (module for module in model.modules() if isinstance(module, Block)):
                for part in ("query", "key", "value", "out", "gate", "up", "down"):
                    setattr(block, part, Adapted(getattr(block, part)))
        return model
