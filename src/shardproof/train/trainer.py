"""The Trainer for our commands: sharded, and with losses that do not depend on the number of processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from shardproof.data.encoding.weights import WEIGHTS
from shardproof.integrations.prepared import as_wanted, compile_units, hold_as_computed
from shardproof.integrations.resume import ResumeMixin
from shardproof.integrations.saved import adapters_of, saved_names
from shardproof.integrations.transformers import ShardedTrainerMixin
from shardproof.integrations.weights import dtype_of_masters, note_dtype
from shardproof.interrupts import left_to_rank
from shardproof.models.families.anatomy import anatomy
from shardproof.models.forward import divides_its_loss, makes_its_mean
from shardproof.models.loading.classes import save_extra_files
from shardproof.models.loading.processors import write_processing
from shardproof.train.adapters.adalora import RanksMixin
from shardproof.train.losses.by_file import by_file, in_chunks, of_each
from shardproof.train.losses.shortcuts import LABELS, Weighed, checks, chunked_loss
from shardproof.train.losses.tokens import dft_loss, refuse_parts, smoothed_loss, token_mean, weighed_loss, with_share
from shardproof.train.model.activations import HeldByHost
from shardproof.train.model.balance import ASKS, BalanceMixin
from shardproof.train.model.parts import with_own_rates
from shardproof.train.model.shared_rows import SharesRows, shared_rows_of
from shardproof.train.optim.optimizers import made_by
from shardproof.train.options.config import Batch
from shardproof.train.rows.lengths import lengths_of
from shardproof.train.rows.sampler import EpochLoader, GlobalBatchSampler, eval_batches
from shardproof.train.rows.streams import StreamMixin
from shardproof.train.stop import StopMixin
from shardproof.train.watching.finite import Counts, FiniteSteps
from shardproof.train.watching.logs_once import LogsOnce
from shardproof.train.watching.recorder import NAMES, Recorder, across
from shardproof.zero.device import widest_float

GROUP = ("params", "weight_decay", "lr")  # entries of a parameter group that do not depend on the optimizer


class CommandMixin(SharesRows, StopMixin, RanksMixin, ResumeMixin, ShardedTrainerMixin):
    """What the trainers of all commands share: the order of rows, what is counted and logged, and what is saved.

    Args:
        batch: how the rows of a step are distributed.
        order_seed: the seed for the order of rows; None keeps their order.
        order_files: what checkpoints record about the rows and their order, by file name.
        group_by_length: whether the rows of a step have similar lengths.
        drop_last: whether rows that do not fill a step are left out of an epoch.
        compiled: whether the model's blocks are compiled.
        activation_offloading: whether the host holds activations between forward and backward. Has no effect without an
            accelerator.
        optimizer_of: creates an optimizer other than AdamW from parameter groups, see `optimizers.made_by`.
        part_rates: learning rates of parts of the model that have their own.
        saved_dtype: the dtype of the weights in model/; None keeps that of the master weights.

    Attributes:
        recorder: counts what this rank does.
        finite: ends a run whose loss is not finite.
    """

    _order: GlobalBatchSampler | None = None

    def __init__(
        self,
        *args: Any,
        batch: Batch,
        order_seed: int | None,
        order_files: Mapping[str, bytes] | None = None,
        group_by_length: bool = False,
        drop_last: bool = False,
        compiled: bool = False,
        activation_offloading: bool = False,
        optimizer_of: Callable[..., torch.optim.Optimizer] | None = None,
        part_rates: Mapping[str, float] | None = None,
        adapter_ratio: float = 1.0,
        saved_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        self.own_rates: tuple[Mapping[str, float], float] | None = (part_rates or {}, adapter_ratio)
        self.saved_dtype = saved_dtype
        self.batch_plan, self.order_seed, self.optimizer_of = batch, order_seed, optimizer_of
        self.compiled = compiled
        self.group_by_length, self.drop_last = group_by_length, drop_last
        self.activation_offloading = activation_offloading
        self._host: HeldByHost | None = None
        self._tokens_seen: int | torch.Tensor = 0
        self.order_files = dict(order_files or {})
        self._places = getattr(kwargs.get("train_dataset"), "places", None)
        super().__init__(*args, **kwargs)
        self.recorder, self.finite = Recorder(), FiniteSteps(self)
        self.share(shared_rows_of(self.model))
        for callback in (self.recorder, self.finite):
            self.add_callback(callback)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW, or the optimizer that `optimizer_of` creates from the same parameter groups."""
        optimizer = super().create_optimizer(model)
        own, self.own_rates = self.own_rates, None  # Trainer may call this twice
        if own is not None and own != ({}, 1.0):
            with_own_rates(optimizer, self.model, *own)
        make, self.optimizer_of = self.optimizer_of, None
        if make is not None:
            groups = [{name: group[name] for name in GROUP} for group in optimizer.param_groups if group["params"]]
            model = torch.nn.ModuleList(self._trained) if self.also_trained else self.model
            self.optimizer = optimizer = made_by(make, groups, self.args.learning_rate, model)
        return optimizer

    def _shard(self) -> None:
        new = not self._sharded
        super()._shard()
        if new and self.compiled:
            for model in self._trained:
                compile_units(model)

    def _shard_one(self, model: Any, stage: int, precision: Any) -> Any:
        """Keep frozen weights in the dtype that they are computed in; a run saves them only if it trains no adapters.
        Not for a reference that follows the trained model, in steps that rounding would lose."""
        asked = all(model is not trained for trained in self._trained)
        if not (asked and getattr(self.args, "sync_ref_model", False)):
            _, precision_here = as_wanted(model, stage, precision)
            held = hold_as_computed(model, precision_here, () if asked else saved_names(model))
            if held and not asked:  # model/ has a single dtype
                self.saved_dtype = self.saved_dtype or torch.float32
        return super()._shard_one(model, stage, precision)

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_dataset
        lengths = lengths_of(rows) if self.group_by_length else None
        told = getattr(rows, "set_epoch", None)  # for rows that differ between epochs
        sampler = GlobalBatchSampler(
            len(rows), self.batch_plan, self.args.process_index, self.order_seed, lengths, self.drop_last, told
        )
        self._order = sampler
        more = {"num_workers": self.args.dataloader_num_workers, "worker_init_fn": left_to_rank}
        return EpochLoader(rows, batch_sampler=sampler, collate_fn=self.data_collator, **more)

    def rows_of_step(self, step: int) -> list[str]:
        """Where the rows of a step are; empty if that is not known."""
        if self._order is None or self._places is None or len(self._places) != self._order.rows:
            return []
        return [place for row in self._order.rows_of(step) for place in self._places.within(row)]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.finite.add(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.finite.norm = norm = super()._get_grad_norm(*args, **kwargs)
        return norm

    @contextlib.contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        with super().compute_loss_context_manager():
            if self._host is None and self.activation_offloading and self.args.device.type != "cpu":
                self._host = HeldByHost(self.args.device)
            with self._host or contextlib.nullcontext():
                yield

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.count(model, inputs)
        found = super().compute_loss(model, inputs, *args, **kwargs)
        self._allow_backward(found[0] if isinstance(found, tuple) else found)
        return found

    def _allow_backward(self, loss: torch.Tensor) -> None:
        """If only towers are trained, rows without files reach no trained weight, and backward has nothing to do."""
        if torch.is_grad_enabled() and not loss.requires_grad and self._trains_towers_only:
            loss.requires_grad_()

    @functools.cached_property
    def _trains_towers_only(self) -> bool:
        part_of = anatomy(self.model).part_of
        return all(part_of[name] != "llm" for name, p in self.model.named_parameters() if p.requires_grad)

    def count(self, model: Any, inputs: dict[str, Any]) -> None:
        if model.training:
            self._tokens_seen = self._tokens_seen + self.tokens_here(inputs)

    def kept_between_logs(self) -> dict[str, Any]:
        run, since_log = (value / self.args.world_size for value in self.recorder.seconds())  # summed over ranks
        return {"tokens": int(self._tokens_seen), "seconds": run, "since_log": since_log}

    def take_kept(self, kept: dict[str, Any]) -> None:
        self._tokens_seen = int(kept["tokens"])
        self.recorder.go_on(kept.get("seconds", 0.0), kept.get("since_log", 0.0))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.recorder.left_out():
            found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.recorder.left_out():
            if self.finite.allows_checkpoint():
                super()._save_checkpoint(*args, **kwargs)

    def files_of_checkpoint(self) -> dict[str, bytes]:
        return self.order_files

    @staticmethod
    def adapters_saved(model: torch.nn.Module) -> list[str]:
        return adapters_of(model)[:1]  # without a reference

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Trainer does, but without its pickled arguments: config.yaml has the options as text."""
        trained = {"selected_adapters": adapters} if (adapters := self.adapters_saved(self.model)) else {}
        self.model.save_pretrained(output_dir, state_dict=state_dict, **trained)
        note_dtype(Path(output_dir or self.args.output_dir), self.saved_dtype or dtype_of_masters(self.model))
        write_processing(self.processing_class, output_dir or self.args.output_dir)
        save_extra_files(self.model, output_dir or self.args.output_dir)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the totals over ranks, and give the recorder the figures of each rank."""
        if "loss" in logs and "tokens" not in logs:
            self._add_recorded(logs, self._of_all_ranks(self._taken()))
        super().log(logs, start_time)

    def _taken(self) -> list[float]:
        seen, self._tokens_seen = float(self._tokens_seen), 0
        return [*self.finite.taken(), *self.recorder.take(seen)]

    def _of_all_ranks(self, mine: list[float]) -> list[list[float]]:
        sent = torch.tensor(mine, device=self.args.device, dtype=widest_float(self.args.device))
        return self.accelerator.gather(sent).view(-1, len(mine)).tolist()

    def _add_recorded(self, logs: dict[str, float], everyone: list[list[float]]) -> None:
        """Add the tokens since the last log, and the most memory that any rank held."""
        own = len(Counts._fields)
        self.finite.known = Counts.of_ranks(rank[:own] for rank in everyone)
        everyone = [rank[own:] for rank in everyone]
        self.recorder.ranks = across(everyone)
        logs["tokens"] = int(sum(rank[NAMES.index("tokens")] for rank in everyone))
        logs["memory"] = int(max(rank[NAMES.index("memory")] for rank in everyone))


class SftTrainer(StreamMixin, BalanceMixin, LogsOnce, CommandMixin, Trainer):
    """Losses are sums over answer tokens divided by the answer tokens of the step on all ranks.

    Trainer divides by the global number of tokens and multiplies by the number of ranks, and the engine averages over
    ranks: together, this is the sum over ranks of sums over tokens.

    Args:
        loss: a plugin's loss; None means the causal loss, or that of the model.
        metrics: plugins' metrics by name.
        packed: whether rows are packed.
        few: batches to test the model on, if rows with files are packed or split. Their loss is always computed without
            the logits.
        chunked: whether the causal loss is computed without the logits.
        dft: whether to use the loss of dynamic fine-tuning, see `dft_loss`.
        smoothing: the share of the causal loss that is the mean over the vocabulary, see `smoothed_loss`.
        balance: the weight of the load-balancing term, see `BalanceMixin`.
        weighed: whether tokens have weights, see `weighed_loss`; None for a stream, for which it is not known.
        deterministic: whether any number of ranks gives the same bits: gradients are added in a fixed order, and no
            factor for the number of ranks is multiplied in and divided out again.

    Raises:
        ConfigError: rows are split, but the model's forward does not take the number of tokens.
    """

    def __init__(
        self,
        *args: Any,
        loss: Callable[..., torch.Tensor] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        packed: bool = False,
        few: list[list[dict[str, Any]]] | None = None,
        chunked: bool = False,
        dft: bool = False,
        smoothing: float = 0.0,
        balance: float = 0.0,
        weighed: bool | None = False,
        deterministic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.chunked, self.dft, self.smoothing = chunked or few is not None, dft, smoothing
        self.balance, self.deterministic = balance, deterministic
        self._loss_shifts_labels = True  # Trainer goes by the class name, which GPT2LMHeadModel does not match
        if deterministic:
            self.shard_options |= {"deterministic": True, "gradient_divide_factor": 1.0}
        sample = None if few is None else lambda: (self._prepare_inputs(self.data_collator(rows)) for rows in few)
        self._weighed = Weighed(weighed)
        self._to_try = checks(packed, chunked, sample, self.in_parts, self._weighed)
        self.metrics = dict(metrics or {})
        divided = self.model_accepts_loss_kwargs and not makes_its_mean(self.model)
        own = dft_loss if dft else functools.partial(smoothed_loss, smoothing=smoothing) if smoothing else loss
        self.compute_loss_func = own if own or (divided and not balance) else token_mean
        self._of_batch = self.compute_loss_func is None and not divides_its_loss(self.model)  # its loss is a mean
        if self.in_parts and not divided and few is None:
            refuse_parts(self.model)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        while self._to_try:
            self._to_try.pop()(model, self._prepare_inputs(inputs))
        loss = super().training_step(model, inputs, *args, **kwargs)
        return loss * self.accelerator.num_processes if self.deterministic else loss  # a mean is logged

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        counted = num_items_in_batch is not None
        if counted:  # 0 if every row of a step is lost: avoids 0 / 0
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        if not self.chunked and WEIGHTS not in inputs:
            # Tells Trainer that the loss is divided by the tokens of all ranks, and that gradients will be averaged.
            self.args.average_tokens_across_devices = not self.deterministic
            try:
                found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            finally:
                self.args.average_tokens_across_devices = True
            return with_share(found, self._learnt(inputs) / num_items_in_batch) if self._of_batch and counted else found
        self._weighed.have_come()
        self.count(model, inputs)
        asked = {**inputs, ASKS: True} if self.balance else inputs  # never with chunks: the two cannot be combined
        loss, outputs = self._own_loss(asked, num_items_in_batch)
        if num_items_in_batch is not None and not self.deterministic:  # over all ranks, over which the engine averages
            loss = loss * self.accelerator.num_processes
        loss = self.balanced(loss, model, inputs, outputs) if self.balance else loss
        self._allow_backward(loss)
        return (loss, outputs) if return_outputs else loss

    def _own_loss(self, inputs: dict[str, Any], num_items: Any, whole: bool = False) -> tuple[torch.Tensor, Any]:
        """The causal loss in chunks, or that of weighted tokens together with the model's outputs (`whole`: always the
        latter)."""
        if self.chunked and not whole:
            return chunked_loss(self.model, inputs, num_items, self.dft, self.smoothing), None
        outputs = self.model(**{name: value for name, value in inputs.items() if name not in LABELS})
        return weighed_loss(outputs, inputs, num_items, self.dft, self.smoothing), outputs

    def _is_mean(self, inputs: Any) -> bool:
        """No: the loss of a batch is weighted by its labelled tokens."""
        return False

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all answer tokens of the rows, and metrics, exact for any number of processes."""
        rows: Any = dataloader.dataset
        files = by_file(rows)
        total = torch.zeros(len(files), self._width, dtype=widest_float(self.args.device), device=self.args.device)
        was_training = self.model.training
        self.model.eval()
        batch, micro = self.batch_plan, self.args.per_device_eval_batch_size
        chunks = [(file, chunk) for file, numbers in enumerate(files.values()) for chunk in in_chunks(numbers, micro)]
        plan = eval_batches(chunks, self.args.process_index // batch.sequence, batch.readers)
        for (file, indices), counts in self.each_evaluated(plan):
            inputs = self._prepare_inputs(self.data_collator([rows[i] for i in indices]))
            with self.sequence:
                loss, outputs = self._summed_loss(inputs)
            if counts:
                total[file] += torch.tensor(self._sums(loss, outputs, inputs), dtype=total.dtype, device=total.device)
        self.model.train(was_training)
        total = self.accelerator.gather(total).view(-1, *total.shape).sum(0)
        means = {f"{metric_key_prefix}_{name}": v for name, v in of_each(files, total, self._means).items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=means, num_samples=len(rows))

    @property
    def _width(self) -> int:
        """How many numbers an evaluation adds up: a sum and a count for the loss and for each metric."""
        return 2 * (1 + len(self.metrics))

    def _sums(self, loss: torch.Tensor, outputs: Any, inputs: dict[str, Any]) -> list[float]:
        """These numbers for one batch."""
        labels = inputs["labels"]
        pairs = [(loss, self._learnt(inputs)), *(metric(outputs, labels) for metric in self.metrics.values())]
        return [float(value) for pair in pairs for value in pair]

    def _means(self, sums: list[float]) -> dict[str, float]:
        """The results of an evaluation, from these numbers added up over all batches."""
        pairs = zip(["loss", *self.metrics], sums[::2], sums[1::2], strict=False)
        return {name: whole / count if count else 0.0 for name, whole, count in pairs}

    def _learnt(self, inputs: dict[str, Any]) -> Any:
        """How many labelled tokens the loss of a batch is summed over."""
        return inputs.get("shift_labels", inputs["labels"][..., 1:]).ne(-100).sum()

    def _summed_loss(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        if WEIGHTS in inputs or (self.chunked and not self.metrics):
            return self._own_loss(inputs, 1, bool(self.metrics))  # metrics need logits
        if self.compute_loss_func is None:
            outputs = self.model(**inputs, num_items_in_batch=1)
            return outputs.loss * (self._learnt(inputs) if self._of_batch else 1), outputs
        outputs = self.model(**{k: v for k, v in inputs.items() if k != "labels"})
        return self.compute_loss_func(outputs, inputs["labels"], num_items_in_batch=1), outputs
