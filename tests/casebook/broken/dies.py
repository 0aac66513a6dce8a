"""A rank's process ends without a word."""

import os

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net


def train(run):
    if run.engine.world > 1 and run.engine.rank == 0:
        os._exit(3)


CASE = Case(users="die", classes=(), threads=(), model=Net, train=train, weights=False)
