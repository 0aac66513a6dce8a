"""Batches of rows with files: read again, passed through the model's processor, and joined with the labels found
before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.weights import batch_of_weights
from shardproof.data.forms.parts import Problem, parts_of
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.rows import Row
from shardproof.errors import DataError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardproof")

SEEN = "cross_attention_mask"  # Mllama's mask of the images that a token sees
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", SEEN)

OnLost = Literal["skip", "stop"]
Encoded = tuple[Mapping[str, Any], dict[str, list[Any]]]  # an element of MediaRows, and its files


class MediaCollator:
    """Batches from `MediaRows`, for a DataLoader with or without workers.

    Args:
        encoder: the model's encoder.
        on_lost: what happens to a row whose file could be read before training and cannot be read now: `skip` leaves it
            out of the batch and logs a warning, `stop` raises.
        speaks: whether batches include the codes of spoken answers.
        flat: whether to concatenate the packed rows of a batch into one, see `wants_flat`.
    """

    def __init__(
        self, encoder: MediaEncoder, on_lost: OnLost = "skip", speaks: bool = False, flat: bool = False
    ) -> None:
        self.encoder, self.on_lost, self.speaks, self.flat = encoder, on_lost, speaks, flat

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`input_ids`, `attention_mask`, `labels` (int64, rows x length), and the tensors of the files in the rows. For
        packed rows, which have `rows`, also the places of their tokens: see `places_of`.

        Raises:
            DataError: a file is lost, and `on_lost` is `stop`.
        """
        if features and "rows" in features[0]:
            return self([{**row, "pack": number} for number, pack in enumerate(features) for row in pack["rows"]])
        there = [(feature, files) for feature in features if (files := self._files(feature["row"])) is not None]
        if not there:
            return self._nothing()
        batch, there = self._batch(there)
        if not there:
            return self._nothing()
        kept = [f for (f, files), ids in zip(there, batch["input_ids"], strict=True) if self._same(f, files, ids)]
        if len(kept) < len(there):
            return self(kept)
        fitted = batch | self._fitted(batch, kept) | self._codes([feature["row"] for feature in kept])
        places = places_of(kept, fitted["input_ids"].shape[1]) if "pack" in kept[0] else {}
        return fitted | {name: value.view(1, -1) if self.flat else value for name, value in places.items()}

    def _batch(self, there: list[Encoded]) -> tuple[dict[str, Any], list[Encoded]]:
        """The tensors of these rows, and the rows. If the processor cannot take them together, it gets them one by one;
        a row that it refuses even then is left out."""
        try:
            return self.encoder.batch([feature["row"] for feature, _ in there], [files for _, files in there]), there
        except Problem as problem:
            if len(there) == 1:
                self._lost(there[0][0]["row"], str(problem))
                return {}, []
        alone = [self._batch([one]) for one in there]
        kept, left = [batch for batch, rows in alone if rows], [one for _, rows in alone for one in rows]
        pad = self.encoder.processor.tokenizer.pad_token_id
        try:
            return together(kept, pad) if kept else {}, left
        except RuntimeError as error:  # from torch, about sizes
            rows = ", ".join(feature["row"].where for feature, _ in left)
            raise DataError(
                f"The files of {rows} do not fit into one batch of this model: its processor cannot batch videos with "
                "different numbers of frames, or images of different sizes.\nTrain with --per-device-batch-size 1."
            ) from error

    def _codes(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The codes of spoken answers, if any row has one: int64 of shape (rows, longest) or, if they come in groups,
        (rows, longest, groups), -100 after the end."""
        import torch

        codes = [row.extra.get("codes", []) for row in rows]
        longest = max(codes, key=len)
        if not self.speaks or not longest:
            return {}
        nothing = [IGNORE] * len(longest[0]) if isinstance(longest[0], list) else IGNORE
        return {"codes": torch.tensor([row + [nothing] * (len(longest) - len(row)) for row in codes])}

    def _files(self, row: Row) -> dict[str, list[Any]] | None:
        try:
            return self.encoder.files(row)
        except Problem as problem:
            self._lost(row, str(problem))
            return None

    def _same(self, feature: Mapping[str, Any], files: Mapping[str, list[Any]], ids: torch.Tensor) -> bool:
        """Whether the files of a row still give the same tokens as before training."""
        expected = feature["input_ids"]
        if not any(files.values()) or ids[: len(expected)].tolist() == list(expected):
            return True
        self._lost(feature["row"], "a file has changed since training began")
        return False

    def _lost(self, row: Row, reason: str) -> None:
        if self.on_lost == "stop":
            raise DataError(f"{row.where}: {reason}")
        log.warning("%s is left out of its step: %s", row.where, reason)

    def _fitted(self, batch: dict[str, Any], features: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Ids, mask and labels of one length. Text rows that were cut before are cut again."""
        import torch

        length = max(len(feature["labels"]) for feature in features)
        ids = torch.full((len(features), length), self.encoder.processor.tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
        for i, feature in enumerate(features):
            n = len(feature["labels"])
            ids[i, :n] = torch.as_tensor(feature["input_ids"])
            labels[i, :n] = torch.as_tensor(feature["labels"])
            mask[i, :n] = 1
        fitted = {"input_ids": ids, "attention_mask": mask, "labels": labels} | batch_of_weights(features, labels)
        return {name: batch[name][:, :length] for name in per_token(batch)} | fitted

    def _nothing(self) -> dict[str, Any]:
        """A batch of one row with nothing to learn."""
        import torch

        batch = nothing(self.encoder.processor.tokenizer.pad_token_id)
        return {**batch, "labels": torch.full_like(batch["input_ids"], IGNORE)}


def check_together(rows: Any, collator: MediaCollator) -> None:
    """Raise DataError if the tensors of videos do not fit into one batch (models of the LLaVA family, which stack
    frames), before a training step fails. Tries the rows of `rows`, a `MediaRows`, with the fewest and the most video
    tokens."""
    token = collator.encoder.tokens.get("video")
    if token is None:
        return
    number = collator.encoder.processor.tokenizer.convert_tokens_to_ids(token)
    ids = rows.encoded.data.column("input_ids")
    seen = [i for i, row in enumerate(rows.rows) if any(part["type"] == "video" for part in parts_of(row.messages))]
    counts = {i: int((ids[i].values.to_numpy() == number).sum()) for i in seen}
    if len(set(counts.values())) > 1:
        collator([rows[min(counts, key=counts.__getitem__)], rows[max(counts, key=counts.__getitem__)]])


def places_of(features: Sequence[Mapping[str, Any]], length: int) -> dict[str, torch.Tensor]:
    """The places of the tokens of rows, each padded to `length`, in their packed rows.

    Returns:
        `packed_places`: int64, packed rows x the longest of them; for each token, its place among those of all rows, -1
            for no token; and
        `packed_positions`, of the same shape: its place in its own row, 0 for no token.
    """
    import torch

    rows: dict[int, list[tuple[int, int]]] = {}
    for i, feature in enumerate(features):
        rows.setdefault(feature["pack"], []).append((i * length, len(feature["labels"])))
    longest = max(sum(size for _, size in pack) for pack in rows.values())
    places = torch.full((len(rows), longest), -1)
    positions = torch.zeros_like(places)
    for i, pack in enumerate(rows.values()):
        places[i, : sum(size for _, size in pack)] = torch.cat([torch.arange(at, at + size) for at, size in pack])
        positions[i, : sum(size for _, size in pack)] = torch.cat([torch.arange(size) for _, size in pack])
    return {"packed_places": places, "packed_positions": positions}


def nothing(pad: int) -> dict[str, Any]:
    """A row of padding, for a model to run on if all rows of a batch are left out."""
    import torch

    ids = torch.full((1, 2), pad)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def per_token(batch: Mapping[str, Any]) -> list[str]:
    """The names of tensors with an entry per token, of shape (rows, length, ...). Tensors of files may have that shape
    by chance, e.g. audio with as many bands as its row has tokens."""
    return [
        name
        for name, value in batch.items()
        if name in _PER_TOKEN or name.endswith("token_type_ids")
        if value.shape[:2] == batch["input_ids"].shape
    ]


def together(batches: Sequence[Mapping[str, Any]], pad: int, side: str = "right") -> dict[str, Any]:
    """Batches of one row each combined into one batch: tensors per token are padded on one side, the others
    concatenated, and padded with zeros if there is a mask for them."""
    import torch

    length = max(batch["input_ids"].shape[1] for batch in batches)
    joined: dict[str, list[Any]] = {}
    for batch in batches:
        each = per_token(batch)
        for name, value in batch.items():
            if name in each:
                fill = pad if name == "input_ids" else 0
                more = length - value.shape[1]
                ends = [more, 0] if side == "left" else [0, more]
                value = torch.nn.functional.pad(value, [0, 0] * (value.ndim - 2) + ends, value=fill)
            joined.setdefault(name, []).append(value)
    masked = any("mask" in name for name in joined if name not in _PER_TOKEN)

    def one(values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):  # one element per file (Unlimited-OCR)
            return [element for value in values for element in value]
        return torch.cat(_of_one_size(values) if masked else list(values))

    return {name: one(values) for name, values in joined.items()}


def _of_one_size(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of files, each padded to the largest sizes."""
    import torch

    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    lacks = [[n - has for n, has in zip(most, value.shape[1:], strict=True)] for value in values]
    ends = [[end for more in reversed(lack) for end in (0, more)] for lack in lacks]
    return [torch.nn.functional.pad(value, end) for value, end in zip(values, ends, strict=True)]


def together_or_alone(
    make: Callable[[Sequence[Any], Sequence[Any]], dict[str, Any]],
    texts: Sequence[Any],
    files: Sequence[Any],
    pad: int,
    side: str = "right",
) -> dict[str, Any]:
    """The result of `make` for rows with files, made one by one if the processor does not take them together. Raises
    Problem for a row that is refused even then."""
    try:
        return make(texts, files)
    except Problem:
        alone = [make([text], [of_one]) for text, of_one in zip(texts, files, strict=True)]
        return together(alone, pad, side)
