"""Processors of transformers with an unusual interface, wrapped to be called like the others.

Saved files are what transformers would save, and the processors' own other methods still work.

[Note: from a text] Voxtral's processor takes audio only in conversations, which mistral-common encodes, so nobody could
tell which tokens are the answer. Here `[AUDIO]` in a text becomes the tokens that mistral-common writes for audio: one
to begin it, and one for every eight frames of its length, padded to a multiple of 30 seconds.

[Note: the start of a text] Emu3's processor puts a token before each text, whatever it begins with, and reports places
without counting it. Here it adds none, and `begins_with` tells code that renders texts to begin them with it.
"""

from __future__ import annotations

import functools
from typing import Any

from shardproof.models.derived import derived

VOXTRAL, EMU3 = "VoxtralProcessor", "Emu3Processor"
_BEGIN = "[BEGIN_AUDIO]"
_FRAMES = 8  # per token: two by a convolution, four by the projector


def called_alike(processor: Any) -> Any:
    """The same processor (changed in place if it is one of those), called with texts and files in their places."""
    cls: Any = type(processor)
    derive = {VOXTRAL: _taking_texts, EMU3: _beginning_nothing}.get(cls.__name__)
    if derive is not None:
        processor.__class__ = derive(cls)
    return processor


@functools.cache
def _taking_texts(cls: Any) -> Any:
    """See [Note: from a text]."""
    from transformers.processing_utils import ProcessorMixin

    def process_audio(self: Any, audio: list[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
        import torch

        frames = options.pop("max_source_positions")
        alone = [self._retrieve_input_features([sound], frames, **options) for sound in audio]
        tokens = [len(windows) * frames // _FRAMES for windows in alone]
        return {"input_features": torch.cat(alone)}, [_BEGIN + count * str(self.audio_token) for count in tokens]

    def apply_chat_template(self: Any, conversation: Any, *args: Any, **options: Any) -> Any:
        as_text = options.get("tokenize") is False  # TRL asks for this; their own method returns tokens even so
        return (ProcessorMixin if as_text else cls).apply_chat_template(self, conversation, *args, **options)

    own = {"__call__": ProcessorMixin.__call__, "_process_audio": process_audio}
    return derived(_taking_texts, cls, {**own, "apply_chat_template": apply_chat_template})


@functools.cache
def _beginning_nothing(cls: Any) -> Any:
    """See [Note: the start of a text]."""
    from transformers.processing_utils import ProcessorMixin

    own = {
        "prepare_inputs_layout": ProcessorMixin.prepare_inputs_layout,
        "begins_with": property(lambda self: self.tokenizer.bos_token or ""),
    }
    return derived(_beginning_nothing, cls, own)
