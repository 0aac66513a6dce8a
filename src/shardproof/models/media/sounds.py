"""Audio features that do not depend on the other audio in the batch.

[Note: each alone] Feature extractors of transformers pad the samples of a batch before transforming them. So next to a
longer one, audio has another last frame than alone, where it is mirrored at its end, and some extractors (Whisper's,
Gemma 3n's) count another number of frames: the row would get other tokens, and another loss. Here each audio is
transformed separately, as in inference, and its frames are padded. Models leave out masked frames.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.models.derived import derived


def hearing_each_alone(processor: Any) -> Any:
    """The same processor (changed in place), with results for audio that do not depend on the batch. See [Note: each
    alone]."""
    for part in ("feature_extractor", "audio_processor"):
        extractor = getattr(processor, part, None)
        if extractor is not None:
            cls: Any = type(extractor)
            extractor.__class__ = _each_alone(cls)
    return processor


@functools.cache
def _each_alone(cls: Any) -> Any:
    """A class derived from this feature extractor class of transformers."""

    def call(self: Any, raw_speech: Any, *args: Any, return_tensors: Any = None, **options: Any) -> Any:
        from transformers import BatchFeature

        # Granite Speech's always makes tensors, and has no such option.
        wanted = {} if return_tensors is None else {"return_tensors": return_tensors}
        arrays = {"return_tensors": "np"} if _takes_wishes(cls) else {}
        if not isinstance(raw_speech, (list, tuple)) or len(raw_speech) < 2 or not hasattr(raw_speech[0], "__len__"):
            return cls.__call__(self, raw_speech, *args, **wanted, **options)
        alone = [cls.__call__(self, [sound], *args, **arrays, **options) for sound in raw_speech]
        made = _together(alone)
        if made is None:
            return cls.__call__(self, raw_speech, *args, **wanted, **options)
        return BatchFeature(made, tensor_type=return_tensors)

    return derived(_each_alone, cls, {"__call__": call})


def _takes_wishes(cls: Any) -> bool:
    parameters = inspect.signature(cls.__call__).parameters
    return "return_tensors" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _together(alone: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The features of single audios combined into a batch, padded with zeros; None if sizes differ and no mask says
    what is padding."""
    import numpy as np

    made: dict[str, Any] = {}
    for name in alone[0]:
        values = [np.asarray(of_one[name]) for of_one in alone]
        longest = np.max([value.shape for value in values], axis=0)
        if any(value.shape != tuple(longest) for value in values) and not any("mask" in other for other in alone[0]):
            return None
        sized = [np.pad(value, [(0, n - has) for n, has in zip(longest, value.shape, strict=True)]) for value in values]
        made[name] = np.concatenate(sized)
    return made
