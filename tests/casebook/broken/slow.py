"""Longer than the limit, but it computes all the time."""

import time

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net


def train(run):
    end = time.monotonic() + 14.0
    while run.engine.world > 1 and time.monotonic() < end:
        pass


CASE = Case(users="compute", classes=(), threads=(), model=Net, train=train, weights=False)
