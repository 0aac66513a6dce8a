"""A language model that speaks: audio tokens in addition to text tokens, several decoded at once.

The idea is that of SLAM-Omni (https://arxiv.org/abs/2412.15649): the vocabulary of a Qwen is extended by that of an
audio codec, and a `GroupDecodeAdapter` turns the audio part of the logits at one position into a whole group of audio
tokens. Here each position predicts the next `code_layer` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import shardproof


class GroupDecodeAdapter(nn.Module):
    """From the audio part of the logits, (rows, length, vocabulary), to the logits of each layer of a group, (rows,
    length, layers, vocabulary)."""

    def __init__(self, audio_vocabulary: int, code_layer: int) -> None:
        super().__init__()
        self.shape = code_layer, audio_vocabulary
        self.linear = nn.Linear(audio_vocabulary, code_layer * audio_vocabulary)

    def forward(self, logits: Tensor) -> Tensor:
        return self.linear(logits).unflatten(-1, self.shape)


@dataclass
class Spoken(CausalLMOutputWithPast):
    """The model's output; without audio there are no `layers`, the logits of groups, and no `codes` to compare with."""

    layers: Tensor | None = None
    codes: Tensor | None = None


@shardproof.register_model("slam_omni")
class SlamOmni(Qwen3ForCausalLM):
    """A Qwen whose last `config.audio_vocabulary` tokens are audio, decoded `config.code_layer` at a time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first_sound = config.vocab_size - config.audio_vocabulary
        self.group_decode_adapter = GroupDecodeAdapter(config.audio_vocabulary, config.code_layer)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Spoken:
        """`labels`, (rows, length), cover text and audio together; `num_items_in_batch` is the number of labels
        learned in the step, on all ranks."""
        outputs = Spoken(**super().forward(input_ids, **kwargs))
        if labels is None:
            return outputs
        loss = summed(outputs.logits[:, :-1], labels[:, 1:])
        sound = labels >= self.first_sound
        if sound.any():
            outputs.layers = self.group_decode_adapter(outputs.logits[..., self.first_sound :])
            outputs.codes = (labels - self.first_sound).masked_fill(~sound, -100)
            loss = loss + loss_over_layers(outputs.layers, outputs.codes)
        else:
            # No audio in this batch: under DDP a parameter without a gradient is an error, so the adapter gets one.
            loss = loss + sum(p.sum() for p in self.group_decode_adapter.parameters()) * 0.0
        outputs.loss = loss / (labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)
        return outputs


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def each_layer(logits: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of each layer with their targets: layer k predicts the token k + 1 positions ahead."""
    for k in range(logits.shape[2]):
        yield logits[:, : -(k + 1), k], codes[:, k + 1 :]


def loss_over_layers(logits: Tensor, codes: Tensor) -> Tensor:
    """The mean over the layers of `logits`, (rows, length, layers, vocabulary)."""
    return torch.stack([summed(said, wanted) for said, wanted in each_layer(logits, codes)]).mean()


@shardproof.register_metric("codes")
def codes(outputs: Spoken, labels: Tensor) -> tuple[Any, Any]:
    """The share of audio tokens that the layers predict correctly."""
    if outputs.layers is None or outputs.codes is None:
        return 0, 0
    pairs = list(each_layer(outputs.layers.argmax(-1), outputs.codes))
    return sum((said == wanted).sum() for said, wanted in pairs), sum((wanted != -100).sum() for _, wanted in pairs)


@shardproof.register_row_format("spoken")
def spoken(record: dict[str, Any]) -> dict[str, Any]:
    """`question`, `answer`, and `codes` if the answer is spoken: a list of groups of audio tokens."""
    sounds = "".join(f"<|audio_{code}|>" for group in record.get("codes") or [] for code in group)
    return {"query": record["question"], "response": record["answer"] + sounds}
