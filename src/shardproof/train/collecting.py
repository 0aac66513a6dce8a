"""Python's garbage collector for reference cycles, which stops a process, and all that wait for it."""

from __future__ import annotations

import gc
from typing import Any

from transformers.trainer_callback import TrainerCallback


class LeavesOutWhatStays(TrainerCallback):
    """Exempts libraries and the model, some 500,000 objects that live for the whole run: scanning them took 0.4 s each
    time.

    Existing garbage is collected first. Call `gc.unfreeze()` when training is over.
    """

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        gc.freeze()
