"""Every rank builds the model from its own seed.

Without a broadcast, each rank trains its own slice of a different model: the loss is higher, but still falls.
"""

from __future__ import annotations

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net

CASE = Case(
    users="build the model before any seed is set, so that ranks start from different weights",
    classes=(28,),
    threads=("pytorch/torchtitan#166", "modelscope/ms-swift#2937", "huggingface/trl#6688"),
    model=Net,
    seed_by_rank=True,
    remedies=(Remedy("set_model_state_dict(broadcast_from_rank0=True)", ("fsdp2",), {"broadcast": True}),),
)
