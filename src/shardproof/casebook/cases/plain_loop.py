"""Control: nothing special. If an engine is not equal here, the casebook uses it wrongly."""

from __future__ import annotations

from shardproof.casebook.case import Case
from shardproof.casebook.models import Net

CASE = Case(users="train a plain model (control)", classes=(), threads=(), model=Net)
