"""One rank computes something else, by a quarter."""

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import Net


def train(run):
    run.record("value", 2.0 + 0.5 * run.engine.rank * (not run.options))


CASE = Case(
    users="differ",
    classes=(31,),
    threads=("owner/name#3",),
    model=Net,
    train=train,
    remedies=(Remedy("a setting", ("ddp",), {"right": True}),),
    not_for={"fsdp2": "it has no word for it"},
)
