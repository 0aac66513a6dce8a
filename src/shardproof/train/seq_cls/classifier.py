"""Label texts with a trained classifier or regression model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.data.encoding.encode import collate
from shardproof.data.encoding.labelled import LabelledEncoder, longest_of, tensor_of
from shardproof.data.encoding.template import set_template
from shardproof.data.forms.labels import LABEL, REGRESSION, SINGLE, Labels, labelled
from shardproof.data.media.labelled import MediaLabelledEncoder
from shardproof.data.rows import BadRow, BadRows, Row, read_rows
from shardproof.errors import ConfigError
from shardproof.train.answers.loaded import Loaded, with_files
from shardproof.train.answers.rows import usable, write_lines
from shardproof.train.model.few import few_tokens
from shardproof.train.model.reward_models import load_judge
from shardproof.train.model.right_padding import check_padding
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.media import check_templated, files_taken, media_limits
from shardproof.train.seq_cls import measures


class Classifier(Loaded):
    """A model that predicts labels, and its tokenizer.

    Args:
        labels: the labels of the model in `folder`.
        system: the system message for conversations that have none.
        template, variables: used instead of the tokenizer's own, see `set_template`.
        plain: texts are read as they are, without a template.
        stage: as for `Loaded`.
        media: the options for files; those that are not set are as in the run.

    Attributes:
        takes_files: whether the model takes files.
    """

    def __init__(
        self,
        folder: Path,
        labels: Labels,
        system: str | None = None,
        trust_remote_code: bool = False,
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
        plain: bool = False,
        stage: int | None = None,
        media: SftConfig | None = None,
    ) -> None:
        self.labels = labels
        super().__init__(folder, self._with_head, trust_remote_code, stage)
        set_template(self.processing, template, variables)
        self.takes_files = bool(files_taken(self.processing))
        if self.takes_files:
            check_templated(plain, f"in {folder}")
        if plain:
            self.tokenizer.chat_template = None
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(f"The tokenizer in {folder} has no padding token. Set its pad_token.")
        self.limits = media_limits(media or SftConfig(), self.processing) if self.takes_files else None
        self.encoder = self._encoder(system)
        self.load()
        self.place_model()
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = longest_of(self.tokenizer, positions)

    def _encoder(self, system: str | None) -> Any:
        if self.limits is None:
            return LabelledEncoder(self.tokenizer, system)
        return MediaLabelledEncoder(self.processing, self.limits, system)

    def _with_head(self, source: str, **options: Any) -> Any:
        return load_judge(source, self.tokenizer.pad_token_id, self.labels, **options)

    def logits(self, rows: Sequence[Row]) -> Any:
        """Logits in fp32, of shape (rows, names). With several ranks, all call this, with their own rows or none. Rows
        that are too long for the model are truncated.

        Raises:
            ConfigError: a row cannot be read by this model.
        """
        import torch

        from shardproof.integrations.transformers import together

        found = torch.zeros(0, len(self.labels.names))
        with together(self.model), torch.no_grad():
            if rows:
                inputs = {name: value.to(self.model.device) for name, value in self._batch(rows).items()}
                found = self.model(**inputs).logits.float().cpu()
        return found

    def _batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        if self.takes_files:
            found = with_files(self.encoder, rows)
            return {} if found is None else found[0]
        batch = []
        for row, made in self.encoder.ids(rows):
            if isinstance(made, str):
                raise ConfigError(f"{f'{row.where}: ' if row.source else ''}{made}.")
            ids = self.encoder.fitted(row, made[0], self.longest, "right")
            batch.append({"input_ids": ids, "labels": ids})
        inputs = collate(batch, self.tokenizer.pad_token_id)
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}

    def said(self, logits: Any) -> dict[str, Any]:
        """The prediction from the logits of a row: the label as `response` (a list if there may be several, numbers in
        a regression), and `probabilities` by name."""
        values, problem = logits.tolist(), self.labels.problem
        if problem == REGRESSION:
            return {"response": values[0] if len(values) == 1 else values}
        shares = (logits.softmax(-1) if problem == SINGLE else logits.sigmoid()).tolist()
        names = [self.labels.shown(i) for i in range(len(shares))]
        response: Any = [name for name, share in zip(names, shares, strict=True) if share > 0.5]
        if problem == SINGLE:
            response = names[int(logits.argmax())]
        told = {str(name): round(share, 6) for name, share in zip(names, shares, strict=True)}
        return {"response": response, "probabilities": told}


def classify_rows(
    model: Classifier,
    dataset: Sequence[str],
    columns: Mapping[str, str],
    file: Path,
    at_once: int,
    bad_rows: BadRows = "stop",
) -> tuple[Iterator[tuple[int, int, Sequence[BadRow]]], Callable[[], tuple[int, dict[str, float]]]]:
    """Label every row of `dataset` and write a line for each: the columns of the row, `messages`, and the result of
    `said`, with the row's own label as `labels` (or null). So the file is itself a dataset.

    Returns: the iterator of `write_lines`, and a function to call at the end, which returns how many rows had their own
        labels, and the metrics over these. All ranks call it.

    Raises:
        DataError: a row cannot be read, or has an unknown label. Then nothing is written.
        ConfigError: the model can only process rows one by one.
    """
    import torch

    rows = read_rows(dataset, bad_rows=bad_rows, columns=columns, form=labelled(model.labels, needed=False))
    if model.takes_files:
        rows = usable(model, rows, model.encoder.problem, bad_rows)
    elif at_once > 1:
        check_padding(model.model, few_tokens(model.tokenizer).to(model.model.device), "Add --batch-size 1.")
    added = torch.zeros(measures.width(model.labels), dtype=torch.float64)
    count = 0

    def answered(some: Sequence[Row], _: int) -> list[dict[str, Any]]:
        nonlocal added, count
        logits = model.logits(some)
        judged = [i for i, row in enumerate(some) if row.extra[LABEL] is not None]
        if judged:
            given = tensor_of([some[i].extra[LABEL] for i in judged], model.labels)
            added += torch.tensor(measures.sums(model.labels, logits[judged], given), dtype=torch.float64)
            count += len(judged)
        return [_line(model, row, one) for row, one in zip(some, logits, strict=True)]

    def measured() -> tuple[int, dict[str, float]]:
        everyone = model.told([(count, added.tolist())])
        total = torch.tensor([sums for _, sums in everyone], dtype=torch.float64).sum(0)
        return sum(rows for rows, _ in everyone), measures.means(model.labels, total.tolist())

    return write_lines(model, rows, file, at_once, answered), measured


def _line(model: Classifier, row: Row, logits: Any) -> dict[str, Any]:
    label = row.extra[LABEL]
    own = None if label is None else model.labels.told(label)
    return {**row.extra["columns"], "messages": row.messages, **model.said(logits), "labels": own}
