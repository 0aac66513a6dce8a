"""Voxtral's processor, called as transformers' others are: with texts, and sounds beside them.

[Note: from a text] That processor takes sounds in conversations only, which mistral-common encodes, so that nobody
could tell which tokens are the answer. Here `[AUDIO]` in a text becomes the tokens that mistral-common writes for a
sound: one that begins it, and one for every eight frames of the 30 seconds, or as many times 30, that it is filled up
to (`tests/models/test_tekken.py`). What is saved is what transformers would save, and its own calls still work.
"""

from __future__ import annotations

import functools
from typing import Any

from shardproof.models.derived import derived

NAME = "VoxtralProcessor"
_BEGIN = "[BEGIN_AUDIO]"
_FRAMES = 8  # to a token: two by a convolution, four by the projector


def taking_texts(processor: Any) -> Any:
    """The same processor; that of Voxtral (changed in place) takes sounds beside texts. See [Note: from a text]."""
    cls: Any = type(processor)
    if cls.__name__ == NAME:
        processor.__class__ = _taking_texts(cls)
    return processor


@functools.cache
def _taking_texts(cls: Any) -> Any:
    """A class derived from this one of transformers' processors."""
    from transformers.processing_utils import ProcessorMixin

    def process_audio(self: Any, audio: list[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
        import torch

        frames = options.pop("max_source_positions")
        alone = [self._retrieve_input_features([sound], frames, **options) for sound in audio]
        tokens = [len(windows) * frames // _FRAMES for windows in alone]
        return {"input_features": torch.cat(alone)}, [_BEGIN + count * str(self.audio_token) for count in tokens]

    return derived(_taking_texts, cls, {"__call__": ProcessorMixin.__call__, "_process_audio": process_audio})
