"""The Trainer of `shardproof sft`: sharded, and with losses that do not depend on the number of processes."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from shardproof.integrations.transformers import ShardedTrainerMixin
from shardproof.train.config import Batch
from shardproof.train.sampler import EpochLoader, GlobalBatchSampler, eval_batches


class View(Protocol):
    """What watches a run: `record` holds what a line of metrics.jsonl holds."""

    def begin(self, steps: int) -> None: ...
    def logged(self, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


class SftTrainer(ShardedTrainerMixin, Trainer):
    """Losses are sums over answer tokens divided by the answer tokens of the step on all ranks.

    Trainer divides by the global number of tokens and multiplies by the number of ranks, the engine averages
    over ranks: together the sum over ranks of sums over tokens.
    """

    def __init__(self, *args: Any, batch: Batch, order_seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch_plan, self.order_seed = batch, order_seed
        self._tokens_seen = 0
        if not self.model_accepts_loss_kwargs:
            self.compute_loss_func = token_mean

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_dataset
        sampler = GlobalBatchSampler(len(rows), self.batch_plan, self.args.process_index, self.order_seed)
        return EpochLoader(rows, batch_sampler=sampler, collate_fn=self.data_collator)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self._tokens_seen += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Trainer does, without its pickled arguments: config.yaml says them in words."""
        self.model.save_pretrained(output_dir, state_dict=state_dict)
        self.processing_class.save_pretrained(output_dir)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what all ranks together did: tokens since the last log, and the most memory one of them held."""
        if "loss" in logs:
            mine = torch.tensor([float(self._tokens_seen), peak_memory()], device=self.args.device, dtype=torch.float64)
            everyone = self.accelerator.gather(mine).view(-1, 2)
            logs["tokens"] = int(everyone[:, 0].sum())
            logs["memory"] = int(everyone[:, 1].max())
            self._tokens_seen = 0
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all answer tokens of the rows, exact for any number of processes."""
        rows: Any = dataloader.dataset
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        was_training = self.model.training
        self.model.eval()
        plan = eval_batches(
            len(rows), self.args.per_device_eval_batch_size, self.args.process_index, self.args.world_size
        )
        for indices, counts in plan:
            inputs = self._prepare_inputs(self.data_collator([rows[i] for i in indices]))
            loss = self._summed_loss(inputs)
            if counts:
                total += torch.stack([loss.double(), inputs["labels"][..., 1:].ne(-100).sum().double()])
        self.model.train(was_training)
        total = self.accelerator.gather(total).view(-1, 2).sum(0)
        metrics = {f"{metric_key_prefix}_loss": float(total[0] / total[1].clamp(min=1))}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(rows))

    def _summed_loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.compute_loss_func is not None:
            labels = inputs["labels"]
            return token_mean(self.model(**{k: v for k, v in inputs.items() if k != "labels"}), labels, 1)
        return self.model(**inputs, num_items_in_batch=1).loss


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The causal loss for models whose forward does not take the number of tokens."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    logits, targets = logits[..., :-1, :].float(), labels[..., 1:].to(logits.device)
    if num_items_in_batch is None:
        num_items_in_batch = targets.ne(-100).sum()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / num_items_in_batch


def peak_memory() -> float:
    """Bytes: the peak of the accelerator, or of the process where there is none."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


class Reporter(TrainerCallback):
    """Turns the Trainer's log into records, for the file and for who watches. Rank 0 only."""

    def __init__(self, write: Callable[[dict[str, Any]], None], view: View) -> None:
        self.write, self.view, self.last = write, view, time.perf_counter()
        self.started = self.last

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = self.last = time.perf_counter()
        self.view.begin(state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs, now = logs or {}, time.perf_counter()
        record: dict[str, Any] = {"step": state.global_step, "epoch": round(state.epoch or 0.0, 4)}
        if "loss" in logs:
            record |= {
                "loss": logs["loss"],
                "grad_norm": logs.get("grad_norm"),
                "lr": logs["learning_rate"],
                "tokens": logs["tokens"],
                "tokens_per_second": round(logs["tokens"] / max(now - self.last, 1e-9), 1),
                "seconds": round(now - self.started, 3),
                "memory": logs["memory"],
            }
        elif "eval_loss" in logs:
            record |= {"eval_loss": logs["eval_loss"], "seconds": round(now - self.started, 3)}
        else:
            return
        self.last = now
        self.write(record)
        self.view.logged(record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.view.end()
