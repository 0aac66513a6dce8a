"""TRL's trainers as `shardproof rlhf` runs them: sharded, with rows in our order, and answers written down."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from shardproof.errors import CheckpointError
from shardproof.train.begun import refer_to
from shardproof.train.models import tokenizer_of
from shardproof.train.pictured_batches import ASKED, BESIDE
from shardproof.train.pictures import are_pictured, in_parts, marks_of, with_others
from shardproof.train.rlhf_config import SAME
from shardproof.train.rlhf_evaluation import evaluate_rows
from shardproof.train.sliced import InRows, OfSomeRows, laid_out, listen, without_none
from shardproof.train.trainer import CommandMixin

if TYPE_CHECKING:
    from shardproof.train.report import Reporter


log = logging.getLogger("shardproof")

ADDED_UP = ("_metrics", "_stored_metrics", "_total_train_tokens")


class RlhfMixin(CommandMixin):
    """What all of them share. `reporter` is for those that generate, `ref_adapters` for those with a reference: of a
    model in adapters that are trained on, TRL's has a copy of these."""

    def __init__(
        self, *args: Any, reporter: Reporter | None = None, ref_adapters: str | None = SAME, **kwargs: Any
    ) -> None:
        self.reporter = reporter
        super().__init__(*args, **kwargs)
        if ref_adapters != SAME:
            refer_to(self.model, ref_adapters)

    def kept_by_rank(self) -> dict[str, Any]:
        """What TRL's trainers add up between two logs."""
        return {name: _plain(getattr(self, name)) for name in ADDED_UP if hasattr(self, name)}

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        for name in ADDED_UP:
            if name in kept and isinstance(kept[name], dict):
                for mode, values in kept[name].items():
                    getattr(self, name)[mode].update(values)
            elif name in kept:
                setattr(self, name, kept[name])

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        return evaluate_rows(self, dataloader, metric_key_prefix)

    def rows_behind(self, name: str, inputs: dict[str, Any], rows: int) -> int:
        """Of how many rows of a micro-batch, which has `rows`, a figure is the mean."""
        return rows

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A run folder has a config.yaml, which says more."""


class Judged(RlhfMixin):
    """KTO. The mismatched answers, from which it estimates how far the model is from the reference, are made by
    turning the answers of a micro-batch round. TRL does that when it prepares the rows, so their order stays; and here
    a micro-batch is that of all ranks together, over which the estimate is averaged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("order_seed")
        batch, wanted, rows = kwargs["batch"], kwargs["args"], kwargs["train_dataset"]
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()  # that of `Dataset.shuffle`
        kwargs["train_dataset"] = rows.select(order)
        # Of rows with files TRL prepares nothing. Evaluation: see rlhf_evaluation.py
        self._together = {"train_dataset": batch.micro * batch.world_size, "eval_dataset": batch.micro}
        for name, together in self._together.items():
            if kwargs[name] is not None and are_pictured(kwargs[name]) and wanted.loss_type != "apo_zero_unpaired":
                kwargs[name] = with_others(kwargs[name], together)
        kwargs["train_dataset"].places = rows.places.in_order(order)
        super().__init__(*args, order_seed=None, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        together = copy.copy(args)
        together.per_device_train_batch_size = self._together[f"{dataset_name}_dataset"]
        return super()._prepare_dataset(dataset, processing_class, together, dataset_name)

    def rows_behind(self, name: str, inputs: dict[str, Any], rows: int) -> int:
        chosen = sum(map(bool, inputs["label"]))
        return chosen if name.endswith("/chosen") else rows - chosen if name.endswith("/rejected") else rows


class OfTokens(RlhfMixin):
    """A trainer that knows of tokens alone. Of rows with files it is given the tokenizer, and rows as they are: what a
    batch has `BESIDE` the tokens goes around it to the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rows, processing = [kwargs["train_dataset"], kwargs["eval_dataset"]], kwargs["processing_class"]
        kwargs["processing_class"] = tokenizer_of(processing)
        with _not_mapped([some for some in rows if some is not None and are_pictured(some)]):
            super().__init__(*args, **kwargs)
        self.processing_class = processing  # to be saved


@contextlib.contextmanager
def _not_mapped(rows: list[Any]) -> Iterator[None]:
    """Inside, `map` leaves these datasets alone: their files are read when a batch is made."""
    for some in rows:
        some.map = lambda *args, some=some, **kwargs: some
    try:
        yield
    finally:
        for some in rows:
            del some.map


class Contrasted(OfTokens):
    """ORPO, CPO and SimPO."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        beside = batch.get(BESIDE, {})

        def forward(ids: torch.Tensor, **options: Any) -> Any:
            return model(**{"input_ids": ids, **options, **beside})

        return super().concatenated_forward(forward, batch)


class Distilled(OfTokens):
    """GKD. TRL divides by the number of tokens in the rows as they were read, of all micro-batches of a step. Of
    answers that the student or the teacher writes that is another number, which nobody knows before the last of them:
    then it is the mean over the tokens of a micro-batch on all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # so tokens are counted: some models say that theirs does not
        if marks := marks_of(self.processing_class, self.model):
            self.generation_config.suppress_tokens = marks  # nothing would stand behind them

    def generate_on_policy_outputs(self, model: Any, inputs: dict[str, Any], generation_config: Any) -> Any:
        beside, of_prompts = inputs.get(BESIDE, {}), inputs.get(ASKED, {})
        asked: Any = SimpleNamespace(generate=functools.partial(model.generate, **{**beside, **of_prompts}))
        made = super().generate_on_policy_outputs(asked, inputs, generation_config)
        more = made[0].shape[1] - inputs["prompts"].shape[1]  # tokens of answers, which are words
        inputs[BESIDE] = {**beside, **{name: pad(kinds, (0, more)) for name, kinds in of_prompts.items()}}
        return made

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mine = inputs["labels"][:, 1:].ne(-100).sum()
        if not model.training:  # by itself
            share = mine.clamp(min=1)
        elif num_items_in_batch is not None and not (self.lmbda or self.seq_kd):
            share = torch.as_tensor(num_items_in_batch).clamp(min=1) / self.accelerator.num_processes
        else:
            share = self.accelerator.gather(mine).sum().clamp(min=1) / self.accelerator.num_processes
            if num_items_in_batch is not None:  # then Trainer does not divide by the micro-batches
                share = share * self.current_gradient_accumulation_steps
        with also_given(inputs.get(BESIDE, {}), model, self.teacher_model):
            return super().compute_loss(model, inputs, return_outputs, share)


@contextlib.contextmanager
def also_given(more: dict[str, Any], *models: torch.nn.Module) -> Iterator[None]:
    """Inside, these models are called with these arguments, too."""
    with contextlib.ExitStack() as stack:
        for model in models if more else ():
            stack.enter_context(listen(model, lambda given: {**given, **more}))
        yield


class Generating(RlhfMixin):
    """GRPO, RLOO, PPO. TRL deals out the prompts, so that every answer to one is judged against the others.

    `make_reference` gives the reference, where one is needed that is not the model without its adapters: TRL would load
    it whole on every rank.
    """

    def __init__(self, *args: Any, make_reference: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        self._fresh = self._warned = False
        self._tools: list[Any] = []
        wanted: Any = kwargs["args"]
        if make_reference is None or not wanted.beta:
            super().__init__(*args, **kwargs)
            self._listen()
            return
        reference = make_reference()  # it seeds; TRL's trainer then has each rank draw numbers of its own
        kwargs["args"] = copy.copy(wanted)
        kwargs["args"].beta, kwargs["args"].sync_ref_model = 0.0, False
        super().__init__(*args, **kwargs)
        self._refer_to(reference, wanted)
        self._listen()

    def _refer_to(self, reference: Any, wanted: Any) -> None:
        """What TRL does with a reference that it loads itself."""
        self.args.beta, self.args.sync_ref_model = wanted.beta, wanted.sync_ref_model
        self.beta = wanted.beta
        if wanted.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(reference, temperature=self.temperature)
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if wanted.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))

    def _listen(self) -> None:
        """Have pictures that TRL deals out as rows laid out before a model sees them, and none taken away."""
        self.in_rows = isinstance(self.processing_class, InRows)
        change = laid_out if self.in_rows else without_none
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and isinstance(self.processing_class, (InRows, OfSomeRows)):
                listen(model, change)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        if not any(self._tools):
            ids, images, fields = super()._tokenize_prompts(prompts)
            return ids, images, laid_out(fields) if self.in_rows else fields
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.chat_template_kwargs}
        together = zip(prompts, self._tools, strict=True)
        written = [self.processing_class.apply_chat_template(p, tools=tools, **how) for p, tools in together]
        return [tokens["input_ids"] for tokens in written], None, {}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Of answers that are written for it, in groups."""
        return super(RlhfMixin, self).evaluation_loop(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return super(CommandMixin, self).get_train_dataloader()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def kept_by_rank(self) -> dict[str, Any]:
        """And answers that are still to be learned from: they last for --steps-per-generation x --num-iterations."""
        left = self._step % (self.args.steps_per_generation * self.args.num_iterations)
        told = {**self._logs, "prompt": [_told(prompt) for prompt in self._logs["prompt"]]}
        return {
            **super().kept_by_rank(),
            "steps": self.state.global_step,
            "epochs": int(self.state.epoch or 0.0),
            "ranks": self.args.world_size,
            "left": _plain(self._buffered_inputs) if left else None,
            "answers": _plain({name: told[name] for name in told if name != "images"}) if self._fresh else None,
        }

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        super().take_kept_by_rank(kept)
        self._step = kept["steps"] * self.args.gradient_accumulation_steps
        for _ in range(kept["epochs"]):  # TRL's sampler draws each order from the generator that drew the last
            next(iter(self._sampler), None)
        if kept["answers"] is not None:  # they are written down with the next log
            self._fresh = True
            _extend(self._logs, kept["answers"])
        if kept["left"] is None:
            return
        if kept["ranks"] != self.args.world_size:
            raise CheckpointError(
                f"The checkpoint holds answers that {kept['ranks']} ranks have still to learn from, and there are"
                f" {self.args.world_size}. Resume on as many, or take --save-steps at which all have been learned from."
            )
        self._buffered_inputs = _on(self.args.device, kept["left"])

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.finite.check_weights()  # or drawing a token fails, with an error that says nothing of why
        self._fresh = True
        self._tools = [row.get("tools") for row in inputs]  # TRL knows only tools that are functions of its own
        return super()._generate_and_score_completions(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._warn_of_cut()
        super().log(logs, start_time)
        if self.reporter is not None and self._fresh:
            prompts = [_told(prompt) for prompt in self._logs["prompt"]]
            self.reporter.generated(self.state.global_step, {**self._logs, "prompt": prompts})
        self._fresh = False

    def _warn_of_cut(self) -> None:
        """Once, where no answer since the last log is learnt from: the loss is then 0, which may look like success."""
        shares = self._metrics["train"].get("completions/clipped_ratio")  # of all ranks
        if self._warned or not self.mask_truncated_completions or not shares or min(shares) < 1:
            return
        self._warned = True
        if self.accelerator.is_main_process:
            log.warning(
                "All answers since the last log, up to step %d, were cut at --max-completion-length %d, and with"
                " --mask-truncated-completions nothing is learnt from such: the loss is 0. Raise"
                " --max-completion-length, or leave --mask-truncated-completions out until answers end by themselves.",
                self.state.global_step,
                self.max_completion_length,
            )


def _told(prompt: Any) -> Any:
    """A prompt without its pictures, of which only the places are written down."""
    if isinstance(prompt, str):
        return prompt
    return [in_parts(turn) if isinstance(turn["content"], list) else turn for turn in prompt]


def _plain(value: Any) -> Any:
    """Dicts and lists of whatever kind as the plain ones; tensors on the CPU."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_plain(item) for item in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _extend(into: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _extend(into[name], value)
        else:
            into[name].extend(value)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on(device, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_on(device, item) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


_KINDS: dict[str, type[RlhfMixin]] = {
    "KTOTrainer": Judged,
    "ORPOTrainer": Contrasted,
    "CPOTrainer": Contrasted,
    "GKDTrainer": Distilled,
    "GRPOTrainer": Generating,
    "RLOOTrainer": Generating,
    "PpoTrainer": Generating,
}


@functools.cache
def trainer_class(trainer: type[Any]) -> type[Any]:
    """The class that runs this trainer of TRL's in our commands."""
    mixin = _KINDS.get(trainer.__name__, RlhfMixin)
    return type(f"Sharded{trainer.__name__}", (mixin, trainer), {"__module__": __name__})


def whole_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of the values where the mask is 1."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
