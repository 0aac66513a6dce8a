"""A block that is used twice in one forward (a shared layer, a resampler, a twice-encoded image) is checkpointed.

Reentrant checkpointing runs a separate backward pass at each use. An engine that reduces a gradient when its hook
fires sees it twice: "The parameter N has already been reduced", "marked as ready twice".
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardproof.casebook.case import PEERS, Case, Remedy
from shardproof.casebook.models import Net, Part
from shardproof.casebook.run import Run


class Shared(Net):
    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        h = self.embed(x)
        for index in (0, 1, 0, 2):
            h = checkpoint(self.blocks[index], h, use_reentrant=reentrant)
        return self.head(self.norm(h))


def loss(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"], run.options.get("use_reentrant", True)), part["y"])


CASE = Case(
    users="checkpoint (reentrant) a block that one forward uses twice, with ZeRO-2",
    classes=(1,),
    threads=("OpenBMB/MiniCPM-V#423", "deepspeedai/DeepSpeed#988", "deepspeedai/DeepSpeed#627"),
    model=Shared,
    loss=loss,
    remedies=(
        Remedy(
            "use_reentrant=False",
            PEERS,
            {"use_reentrant": False},
        ),
        Remedy("static_graph=True", ("ddp",), {"static_graph": True}),
    ),
)
