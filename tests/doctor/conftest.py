"""Commands are run here as in tests/train: forked from one process that has imported everything."""

from __future__ import annotations

from train.conftest import commands, drivers, rows, tiny  # noqa: F401
