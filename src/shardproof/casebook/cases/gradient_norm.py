"""The gradient norm that is logged and clipped by is that of the full gradient, the same everywhere.

1656 against 0.025 at the same loss: the norm of a rank's slice, or of a rank's own gradient.
"""

from __future__ import annotations

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net, sgd

CASE = Case(
    users="clip by the global gradient norm, and log it",
    classes=(32,),
    threads=("modelscope/ms-swift#6815", "pytorch/pytorch#88621", "pytorch/pytorch#170862"),
    model=Net,
    optimizer=sgd,
    clip=0.05,
)
