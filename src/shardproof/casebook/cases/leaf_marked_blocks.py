"""Decoder blocks are marked as ZeRO-3 leaf modules, and most of the model is not updated.

There is no error: the gradients inside them are dropped, about 390 of 417 tensors stay bit-exact, the gradient norm is
merely low. Other engines have nothing to mark.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Block, Net, Part, plain, trainable
from shardproof.casebook.run import Run


class Layer(nn.Module):
    """A decoder layer of two blocks that returns a tuple, as many implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Block(), Block()

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.attention(h)
        return self.mlp(h), h


class Decoder(Net):
    def __init__(self) -> None:
        super().__init__(depth=0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h, _ = layer(h)
        return self.head(self.norm(h))


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"]), part["y"])


def train(run: Run) -> None:
    before = run.state()
    plain(run)
    after = run.state()
    run.record("tensors that moved", sum(not before[name].equal(after[name]) for name in after))
    run.record("tensors that train", len(trainable(run.module)))


CASE = Case(
    users="mark decoder layers as leaf modules for ZeRO-3",
    classes=(10,),
    threads=("OpenRLHF/OpenRLHF#1258",),
    model=Decoder,
    train=train,
    loss=loss,
    remedies=(Remedy("set_z3_leaf_modules(model, [Layer])", ("deepspeed-3",), {"leaf_modules": (Layer,)}),),
)
