"""Python's search for cycles of objects, which stops a process, and all that wait for it."""

from __future__ import annotations

import gc
from typing import Any

from transformers.trainer_callback import TrainerCallback


class LeavesOutWhatStays(TrainerCallback):
    """Libraries and the model, some 500,000 objects, stay for the whole run: to go through them took 0.4 s each time.

    What is garbage by then is collected first. When training is over, `gc.unfreeze()` is due.
    """

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        gc.freeze()
