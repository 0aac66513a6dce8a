"""One process and two, at stages with both kinds of checkpointing: options of runs that have the same numbers."""

from __future__ import annotations

TWO = ["--nproc", "2"]
AGAIN = ["--gradient-checkpointing"]
PLAN = {
    "one": [],
    "stage 0": TWO,
    "stage 2": [*TWO, "--stage", "2", *AGAIN, "--checkpointing-reentrant", "--per-device-batch-size", "2"],
    "stage 3": [*TWO, "--stage", "3", *AGAIN, "--save-steps", "3"],
}
