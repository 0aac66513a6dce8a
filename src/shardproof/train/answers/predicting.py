"""Answers to the rows that a run is evaluated on, written by the model as it is then, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import EvalLoopOutput

from shardproof.data.encoding.asked import Feature, last_answer, unpacked
from shardproof.data.media.batches import per_token
from shardproof.integrations.prepared import together
from shardproof.train.answers.metrics import Metric, judged
from shardproof.train.answers.sampling import Sampling
from shardproof.train.answers.writing import Writer
from shardproof.train.losses.by_file import by_file, in_chunks, of_each
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rows.sampler import eval_batches
from shardproof.train.trainer import SftTrainer

Record = dict[str, Any]  # `prompt`, `completion`, `labels` (the right answer) and `rewards`, by metrics


class PredictingTrainer(SftTrainer):
    """Has the model answer the rows of an evaluation, besides.

    Args:
        worth: what an answer is worth beside the right one, by the names of metrics.
        sampling: how long answers are at most, and where they end. Tokens are the likeliest, always.
        told: called with the step and what became of each row; None on other ranks than the first.

    Raises:
        ConfigError: the model has no generate(), or a metric cannot judge an answer.
    """

    def __init__(
        self,
        *args: Any,
        worth: Mapping[str, Metric],
        sampling: Sampling,
        told: Callable[[int, Sequence[Record]], None] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.worth, self.sampling, self.told = worth, sampling, told
        self.tokenizer = tokenizer_of(self.processing_class)
        self._writer = Writer(self.model, self.tokenizer, "the model", self.accelerator.is_main_process)
        self._rows: Sequence[Feature] = unpacked(self.eval_dataset)
        self._try_metrics()

    def _try_metrics(self) -> None:
        """Those that cannot judge an empty answer would end the run at its first evaluation."""
        for row in self._rows:
            if (span := last_answer(row["labels"])) is not None:
                right = self._text(row["input_ids"][slice(*span)])
                judged(self.worth, "", right)
                return

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """And the mean of each metric over the rows that ask something."""
        found = super().evaluation_loop(*args, **kwargs)
        rows: Any = self.eval_dataset
        records = self._records()
        if self.told is not None:
            places = [place for number in range(len(rows)) for place in rows.places.within(number)]
            self.told(self.state.global_step, [{**records[n], "row": places[n]} for n in sorted(records)])
        files = by_file(rows) if self._rows is rows else {"": range(len(self._rows))}
        worth, prefix = self._worth(files, records), kwargs.get("metric_key_prefix", "eval")
        found.metrics.update({f"{prefix}_{name}": value for name, value in worth.items()})
        return found

    def _worth(self, files: Mapping[str, Sequence[int]], records: Mapping[int, Record]) -> dict[str, float]:
        """The means, of all rows and of each file."""
        each = {number: [*record["rewards"].values(), 1.0] for number, record in records.items()}
        none = [0.0] * (len(self.worth) + 1)
        of_files = [[none, *(each[number] for number in its if number in each)] for its in files.values()]
        added = [[sum(column) for column in zip(*of_one, strict=True)] for of_one in of_files]
        sums = torch.tensor(added, dtype=torch.float64)

        def means(added: list[float]) -> dict[str, float]:
            *totals, count = added
            return {name: total / max(count, 1.0) for name, total in zip(self.worth, totals, strict=True)}

        return of_each(files, sums, means)

    def _records(self) -> dict[int, Record]:
        """What became of each row that asks something, by its number. Ranks have different ones answered."""
        size = self.args.per_device_eval_batch_size if self._takes_text else 1
        groups = in_chunks(range(len(self._rows)), size)
        plan = eval_batches(groups, self.args.process_index, self.args.world_size)
        mine: dict[int, Record] = {}
        was_training = self.model.training
        self.model.eval()
        with together(self.model):
            for numbers, counts in self.each_evaluated(plan):
                if counts:
                    mine |= self._answered({number: self._rows[number] for number in numbers})
        self.model.train(was_training)
        return {number: record for part in gather_object([mine]) for number, record in part.items()}

    @property
    def _takes_text(self) -> bool:
        """And nothing else."""
        return self.processing_class is self.tokenizer

    def _answered(self, rows: Mapping[int, Feature]) -> dict[int, Record]:
        """The same of rows that are asked at once; without one whose file is lost."""
        if self._takes_text:
            whole, batch = dict(rows), None
        else:
            ((number, row),) = rows.items()
            batch = self.data_collator([row])
            whole = {number: {name: batch[name][0].tolist() for name in ("input_ids", "labels")}}
        spans = {number: span for number, row in whole.items() if (span := last_answer(row["labels"])) is not None}
        if not spans:
            return {}
        prompts = [list(whole[number]["input_ids"][:begin]) for number, (begin, _) in spans.items()]
        if batch is None:
            inputs = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        else:
            inputs = _cut(batch, len(prompts[0]))
        tokens = self._writer.write(self._prepare_inputs(inputs), self.sampling, plain=False)
        found = {}
        texts = self._writer.texts(tokens, self.sampling)
        for (number, span), prompt, text in zip(spans.items(), prompts, texts, strict=True):
            right = self._text(whole[number]["input_ids"][slice(*span)])
            worth = judged(self.worth, text, right)
            found[number] = {"prompt": self._text(prompt), "completion": text, "labels": right, "rewards": worth}
        return found

    def _text(self, ids: Any) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()


def _cut(batch: Mapping[str, Any], end: int) -> dict[str, Any]:
    """What a model is asked of a row with files: its tokens up to here."""
    each = per_token(batch)
    asked = {name: value[:, :end] if name in each else value for name, value in batch.items()}
    return {name: value for name, value in asked.items() if name not in ("labels", "codes")}
