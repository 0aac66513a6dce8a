"""Control: nothing special. An engine that is not equal here is driven wrongly by the casebook."""

from __future__ import annotations

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net

CASE = Case(users="train a plain model (control)", classes=(), threads=(), model=Net)
