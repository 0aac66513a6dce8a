"""The model that a run writes at its end, in its folder model/."""

from __future__ import annotations

import logging
import shutil
from typing import Any

from shardproof.errors import CheckpointError
from shardproof.train.adapters.beginning import fit_to_base, takes_from_weights
from shardproof.train.folder import RunFolder
from shardproof.train.model.dtypes import asked_dtype
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.config import RunConfig

log = logging.getLogger("shardproof")


def save_model(trainer: Any, config: RunConfig, processing: Any, folder: RunFolder, first: bool) -> None:
    """Write the trained weights, on all ranks together, and on the `first` the other files of a model folder.

    Raises:
        CheckpointError: the weights cannot be written.
    """
    from safetensors import SafetensorError  # how PEFT's files fail

    from shardproof.integrations.saved import adapters_of, readable_as_the_rest
    from shardproof.models.loading.mtp import carry_mtp
    from shardproof.models.loading.processors import write_processing

    try:
        trainer.save_model(str(folder.unfinished))
        if first and takes_from_weights(config):
            fit_to_base(folder.unfinished, folder.path)
            readable_as_the_rest(folder.unfinished)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"The weights cannot be written to {folder.unfinished}: {error}") from error
    if first:
        if processing is not tokenizer_of(processing):  # the trainer may only have had the tokenizer
            write_processing(processing, folder.unfinished)
        if not adapters_of(trainer.model):
            try:
                carry_mtp(trainer.model, folder.unfinished, asked_dtype(config))
            except (OSError, SafetensorError) as error:  # not worth losing the trained weights
                log.warning("Layers of the base for multi-token prediction (MTP) are left out: %s", error)
            readable_as_the_rest(folder.unfinished)
        shutil.rmtree(folder.model, ignore_errors=True)  # from a run that had already finished when it was resumed
        folder.unfinished.rename(folder.model)
