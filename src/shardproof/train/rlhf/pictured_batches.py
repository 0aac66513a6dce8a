"""Batches of rows with files and answers, for TRL's trainers for pairs, judged answers and distillation.

TRL's collators call the processor on prompts with the images of all rows: there it also gets the other files. Trainers
that only support tokens (ORPO's, CPO's, GKD's) get these in their format, and under `BESIDE` the other inputs of the
model, which `Contrasted` and `Distilled` in trainers.py pass on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

from shardproof.data.forms.parts import Problem
from shardproof.data.media.batches import SEEN, together_or_alone
from shardproof.data.media.encode import MediaEncoder
from shardproof.errors import DataError
from shardproof.train.rlhf.behind import tokens_behind
from shardproof.train.rlhf.pictures import FILES, NUMBER, OTHER

TYPES = ("token_type_ids", "mm_token_type_ids")  # for each token: whether it stands for a file, and of which kind
OF_TOKENS = ("input_ids", "attention_mask", "completion_mask", *TYPES)
BESIDE = "what the model takes beside the tokens"
ASKED = "the same of prompts, where it is another"

Examples = list[dict[str, Any]]


def collator_for(rows: Any, kind: str, max_length: int | None, marks: Sequence[int] = ()) -> Any:
    """The collator for the algorithm `kind`. `marks`: the tokens that stand for files or begin them."""
    encoder = rows.format["format_kwargs"]["transform"].encoder
    makes: dict[str, Any] = {"dpo": _pairs, "kto": _judged, "rm": _scored, "gkd": _taught}
    make = makes.get(kind) or partial(_halves, marks)

    class OfAllFiles(DataCollatorForVisionPreference):  # type: ignore[misc]
        def torch_call(self, examples: Examples) -> dict[str, Any]:
            examples = [{name: value for name, value in one.items() if name != NUMBER} for one in examples]
            files = [example.pop(FILES) for example in examples]
            try:
                made: dict[str, Any] = make(encoder, [of_row.by_kind for of_row in files], max_length, examples)
            except Problem as problem:
                raise DataError(f"{files[0].where} and those beside it: {problem}") from None
            return made

    return OfAllFiles(encoder.processor)


class _WithFiles:
    """A processor that is called with texts and images, and processes all files of the rows with them. It does so once
    if called again with the same, and row by row if necessary. `made`: its output."""

    def __init__(self, encoder: MediaEncoder, files: list[dict[str, list[Any]]]) -> None:
        self._encoder, self._files = encoder, files
        self.made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder.processor, name)

    def __call__(self, text: list[str], return_tensors: str, **options: Any) -> Any:
        make = partial(self._encoder.process, return_tensors=return_tensors)
        if "images" not in options:  # answers, to which some processors would prepend tokens (Mllama's)
            said = self._encoder.processor.tokenizer(text, return_tensors=return_tensors, **options)
            return dict(said) | {name: torch.zeros_like(said["input_ids"]) for name in TYPES if name in self.made}
        del options["images"]
        if self.made is None:
            make = partial(make, text_kwargs=options)
            padding = self._encoder.processor.tokenizer.pad_token_id
            self.made = together_or_alone(make, text, self._files, padding, options["padding_side"])
        return dict(self.made)  # TRL modifies it


def _pairs(encoder: MediaEncoder, files: Any, max_length: int | None, examples: Examples) -> dict[str, Any]:
    """Batches for DPO: all chosen answers, then all rejected ones."""
    processor = _WithFiles(encoder, files * 2)
    made = dict(DataCollatorForVisionPreference(processor, max_length).torch_call(examples))
    return made | _unknown(processor.made, made["input_ids"].shape[1])


def _of_each_token(prompts: dict[str, Any]) -> list[str]:
    """The names of per-token inputs besides ids and mask."""
    return [name for name in prompts if name == SEEN or name.endswith("token_type_ids")]


def _unknown(prompts: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
    """Per-token inputs that TRL does not know (Mllama's, ERNIE's), for rows of `length` tokens. Prompts are padded on
    the left here, but stand at the beginning of rows in TRL's batches."""

    def row(name: str, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return answered(name, value[mask == 1][None], length)[:, :length]

    masks = prompts["attention_mask"]
    return {
        name: torch.cat([row(name, value, mask) for value, mask in zip(prompts[name], masks, strict=True)])
        for name in _of_each_token(prompts)
        if name not in TYPES
    }


def answered(name: str, value: torch.Tensor, more: int) -> torch.Tensor:
    """A per-token input of prompts (rows, length, ...), extended by `more` tokens of answers. These are text, and
    attend to the images that the ends of their prompts attend to."""
    last = value[:, -1:] if name == SEEN else torch.zeros_like(value[:, -1:])
    return torch.cat([value, last.expand(-1, more, *value.shape[2:])], dim=1)


def _scored(encoder: MediaEncoder, files: Any, max_length: int | None, examples: Examples) -> dict[str, Any]:
    """Batches for a reward model: as for DPO, without the mask of answers."""
    made = _pairs(encoder, files, max_length, examples)
    del made["completion_mask"]
    return made


def _halves(
    marks: Sequence[int], encoder: MediaEncoder, files: Any, max_length: int | None, examples: Examples
) -> dict[str, Any]:
    """Batches for ORPO and CPO: chosen and rejected answers as separate tensors."""
    made = _pairs(encoder, files, max_length, examples)
    ids, mask = made["input_ids"], made.pop("attention_mask")
    labels = ids.masked_fill(made.pop("completion_mask") == 0, -100)
    # ORPO also learns questions, but tokens that stand for files are not text. The model gets the ids in `BESIDE`.
    said = ids.masked_fill(torch.isin(ids, torch.tensor([*marks])), -100)
    batch: dict[str, Any] = {}
    for name, tokens in (("input_ids", said), ("attention_mask", mask), ("labels", labels)):
        batch[f"chosen_{name}"], batch[f"rejected_{name}"] = tokens.chunk(2)
    return batch | {BESIDE: made}


def _judged(encoder: MediaEncoder, files: Any, max_length: int | None, examples: Examples) -> dict[str, Any]:
    """Batches for KTO. The answers that it compares with are those from `with_others`; TRL's collator would take them
    from this rank's rows."""
    others = [example.pop(OTHER, None) for example in examples]
    processor = _WithFiles(encoder, files)
    judged = DataCollatorForVisionUnpairedPreference(processor, max_length, calculate_kl=False)
    made = dict(judged.torch_call([dict(example) for example in examples]))
    if others[0] is None:
        return made | _unknown(processor.made, made["input_ids"].shape[1])
    other = judged.torch_call(
        [{**example, "completion": answer} for example, answer in zip(examples, others, strict=True)]
    )
    length = max(of_rows["input_ids"].shape[1] for of_rows in (made, other))
    unknown = _unknown(processor.made, length)
    if unknown:  # TRL passes the same to the model with both
        _lengthen(made, length, processor.tokenizer.pad_token_id)
        _lengthen(other, length, processor.tokenizer.pad_token_id)
    return made | {f"KL_{name}": other[name] for name in OF_TOKENS if name in other} | unknown


def _lengthen(rows: Any, length: int, padding: int) -> None:
    """Pad the per-token inputs of rows on the right."""
    for name in OF_TOKENS:
        if name in rows:
            ends = (0, length - rows[name].shape[1])
            rows[name] = pad(rows[name], ends, value=padding if name == "input_ids" else 0)


def _taught(encoder: MediaEncoder, files: Any, max_length: int | None, examples: Examples) -> dict[str, Any]:
    """Batches for GKD: conversations whose last turn is learned, and the prompts before it."""
    processor = _WithFiles(encoder, files)
    judged = DataCollatorForVisionUnpairedPreference(processor, max_length, calculate_kl=False)
    turns = [example["messages"] for example in examples]
    made = dict(
        judged.torch_call(
            [
                {"prompt": said[:-1], "completion": said[-1:], "images": of_row["image"], "label": True}
                for said, of_row in zip(turns, files, strict=True)
            ]
        )
    )
    del made["label"]
    ids = made.pop("input_ids")
    learnt = made.pop("completion_mask")
    for row, said in zip(learnt, turns, strict=True):
        places = row.nonzero()[:, 0]
        row[places[len(places) - tokens_behind(encoder, said) :]] = 0
    return {
        "input_ids": ids,
        "attention_mask": made.pop("attention_mask"),
        "labels": ids.masked_fill(learnt == 0, -100),
        "prompts": processor.made["input_ids"],
        "prompt_attention_mask": processor.made["attention_mask"],
        BESIDE: made | _unknown(processor.made, ids.shape[1]),
        ASKED: {name: processor.made[name] for name in _of_each_token(processor.made)},
    }
