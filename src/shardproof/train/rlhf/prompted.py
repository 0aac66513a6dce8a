"""Prompts with files, for TRL's trainers that generate.

These split the rows of a generation into micro-batches in a random order, together with image tensors that they know by
name. Here TRL only sees rows of tokens, with the number of the dataset row for each. By these numbers, the model is
given what the processor makes of the files of exactly the rows in a call, whatever tensors these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from shardproof.data.forms.parts import FILE_COLUMNS, Problem
from shardproof.data.media.batches import SEEN, per_token, together_or_alone
from shardproof.errors import DataError
from shardproof.train.rlhf.pictures import FILES, NUMBER, Examples

TOKENS = ("input_ids", "attention_mask")
Tensors = dict[str, torch.Tensor]


class Prompted:
    """The prompts of a dataset and their files. Rows are identified by their numbers.

    Attributes:
        now: the rows that TRL is working on, in its order.
    """

    def __init__(self, dataset: Any) -> None:
        self._examples: Examples = dataset.format["format_kwargs"]["transform"]
        self.now: list[int] = []
        self._read: dict[int, tuple[list[dict[str, Any]], dict[str, list[Any]]]] = {}
        self._made: dict[tuple[int, ...], Tensors] = {}

    def begin(self, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start generating answers to these examples. Returns them in TRL's format, without files."""
        self._read, self._made, self.now = {}, {}, [example[NUMBER] for example in examples]
        for example in examples:
            self._keep(example)
        return [{name: example[name] for name in example if name not in (FILES, NUMBER)} for example in examples]

    @property
    def files(self) -> list[dict[str, list[Any]]]:
        """The files of each current row, by kind."""
        return [self._read[number][1] for number in self.now]

    @property
    def columns(self) -> list[dict[str, list[Any]]]:
        """The same, as columns for rewards."""
        return [{name: of_row[kind] for kind, name in FILE_COLUMNS.items()} for of_row in self.files]

    @property
    def where(self) -> str:
        """The location of the first current row."""
        return self._examples.rows[self.now[0]].where

    def _keep(self, example: dict[str, Any]) -> None:
        self._read[example[NUMBER]] = example["prompt"], example[FILES].by_kind

    def asked(self) -> tuple[list[list[int]], Tensors]:
        """The token ids of the current prompts, and the other inputs of the model, padded on the left."""
        made = self._of(self.now)
        self._made.clear()  # later calls have fewer rows
        ids = [row[mask == 1].tolist() for row, mask in zip(*(made[name] for name in TOKENS), strict=True)]
        return ids, {name: value for name, value in made.items() if name not in TOKENS}

    def given(self, numbers: Sequence[int], before: int, behind: int, device: torch.device) -> Tensors:
        """Inputs of the model besides the tokens of these rows. Each has `before` tokens of prompt, padded on the left,
        and `behind` tokens of answer, which attend to the images that the end of the prompt attends to."""
        made = self._of(numbers)
        more = {name: value.to(device) for name, value in made.items() if name not in TOKENS}
        for name in per_token(made):
            if name in more:
                left = before - more[name].shape[1]
                more[name] = pad(more[name], [0, 0] * (more[name].ndim - 2) + [left, behind])
                if name == SEEN:
                    more[name][:, before:] = more[name][:, before - 1 : before]
        return more

    def _again(self, number: int) -> dict[str, Any]:
        example = self._examples.example(number)
        if example[NUMBER] != number:
            where = self._examples.rows[number].where
            raise DataError(f"{where}: a file is missing, and answers about it still have to be learned from.")
        return example

    def _of(self, numbers: Sequence[int]) -> Tensors:
        """The processor's output for the prompts of these rows, cached because the reference needs it too and answers
        may be learned from more than once."""
        key = tuple(numbers)
        if key not in self._made:
            encoder = self._examples.encoder
            for number in numbers:
                if number not in self._read:  # answers of a checkpoint
                    self._keep(self._again(number))
            turns, files = zip(*(self._read[number] for number in numbers), strict=True)
            fill = encoder.processor.tokenizer.pad_token_id
            try:
                self._made[key] = together_or_alone(encoder.asked, turns, files, fill, "left")
            except Problem as problem:
                raise DataError(f"{self._examples.rows[numbers[0]].where} and those beside it: {problem}") from None
        return self._made[key]
