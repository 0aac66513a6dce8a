"""The Trainer of `shardproof sft --task embedding`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from shardproof.models.forward import without_adapters
from shardproof.train.embedding import similarity
from shardproof.train.embedding.pooling import Embedding, pooled
from shardproof.train.embedding.similarity import Embedded
from shardproof.train.losses.by_file import in_chunks
from shardproof.train.rows.sampler import eval_batches
from shardproof.train.trainer import SftTrainer


class EmbeddingTrainer(SftTrainer):
    """Losses are sums over rows divided by the number of rows in the step on all ranks, which is the same in each step.

    [Note: negatives of all ranks] The negatives of a row are the texts of a micro-batch on all ranks. Every rank
    gathers the embeddings of the others and computes the loss of all rows, with only its own embeddings attached to the
    graph. The gradient through these is everything that they contribute, including as negatives of the rows of other
    ranks. Summed over ranks it equals that of one process, and nothing is sent in backward. The cost is the similarity
    matrix of all rows on each rank, which is small compared to the model. The value of the loss is split evenly among
    ranks.

    Args:
        embedding: how texts are embedded.
        kind: the loss.
        temperature: the divisor of similarities in the loss `infonce`.
    """

    def __init__(self, *args: Any, embedding: Embedding, kind: str, temperature: float, **kwargs: Any) -> None:
        self.embedding, self.kind, self.temperature = embedding, kind, temperature
        super().__init__(*args, loss=self._loss, **kwargs)
        self.model_accepts_loss_kwargs = False  # the model only returns the vectors of tokens

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        return torch.tensor(self.batch_plan.whole * self.batch_plan.sequence, device=device)

    def _embedded(self, outputs: Any, labels: dict[str, Any]) -> Embedded:
        texts = pooled(outputs["last_hidden_state"], labels["mask"], self.embedding.pooling)
        return Embedded.of(texts, labels["rows"], labels["keys"], labels["scores"])

    def _loss(self, outputs: Any, labels: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        mine = self._embedded(outputs, labels)
        if self.kind != "infonce":
            return getattr(similarity, self.kind)(mine) / num_items_in_batch  # type: ignore[no-any-return]
        loss = similarity.infonce(self._of_every_rank(mine), self.temperature) / num_items_in_batch
        readers = self.batch_plan.readers
        # A share of the value, but the full gradient.
        return loss / readers + (loss - loss.detach()) * (1 - 1 / readers)

    def _of_every_rank(self, mine: Embedded) -> Embedded:
        """The batches of all ranks as one, in order of ranks; only this rank's own has gradients. Ranks that share rows
        have one batch."""
        if self.batch_plan.readers == 1:
            return mine
        together = self.batch_plan.sequence
        self._meet()  # ranks that have not finished may need slices from this one
        device = mine.queries.device
        counts = gather(torch.tensor([[len(mine.queries), len(mine.negatives)]], device=device)).tolist()
        texts = torch.cat([mine.queries, mine.positives, mine.negatives]).detach()
        most = max(2 * rows + more for rows, more in counts)
        vectors = gather(functional.pad(texts, (0, 0, 0, most - len(texts)))).split(most)
        keys = gather(functional.pad(mine.keys, (0, most - len(mine.keys)))).split(most)
        scores = mine.scores.new_ones(1)
        batches = [
            Embedded.of(of_texts[: 2 * rows + more], rows, of_keys[: rows + more], scores.expand(rows))
            for of_texts, of_keys, (rows, more) in list(zip(vectors, keys, counts, strict=True))[::together]
        ]
        batches[self.accelerator.process_index // together] = mine
        return Embedded.together(batches)

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over rows, and metrics over all of them together, exact on any number of processes. Rows are
        negatives of each other in groups of the size of a step, so the loss does not depend on that number either."""
        rows: Any = dataloader.dataset
        was_training = self.model.training
        self.model.eval()
        batch, mine = self.batch_plan, []
        chunks = in_chunks(range(len(rows)), batch.micro)
        reader, other = divmod(self.args.process_index, batch.sequence)
        for indices, counts in self.each_evaluated(eval_batches(chunks, reader, batch.readers)):
            inputs = self._prepare_inputs(self.data_collator([rows[i] for i in indices]))
            labels = inputs.pop("labels")
            with self.sequence:
                found = self._embedded(self.model(**inputs), labels)
            if counts and not other:
                mine.append((indices[0], [part.cpu() for part in found]))
        self.model.train(was_training)
        self._meet()
        everyone = sorted(gather_object(mine), key=lambda pair: pair[0])
        means = self._measured([Embedded(*parts) for _, parts in everyone])
        means = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=means, num_samples=len(rows))

    def _measured(self, batches: list[Embedded]) -> dict[str, float]:
        """The metrics for the batches of an evaluation, which have the size of micro-batches, in order."""
        whole = Embedded.together(batches)
        if self.kind != "infonce":
            loss = float(getattr(similarity, self.kind)(whole))
            return {"loss": loss / len(whole.queries), **similarity.correlation(whole)}
        at_once = self.batch_plan.whole // self.batch_plan.micro
        groups = [Embedded.together(batches[i : i + at_once]) for i in range(0, len(batches), at_once)]
        loss = sum(float(similarity.infonce(group, self.temperature)) for group in groups)
        return {"loss": loss / len(whole.queries), **similarity.retrieval(whole)}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        width = without_adapters(self.model).config.get_text_config().hidden_size
        self.embedding.write(Path(output_dir or self.args.output_dir), width)
