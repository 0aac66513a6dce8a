"""TRL's trainers as `shardproof rlhf` runs them: sharded, with rows in our order, and answers written down."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rlhf.generating import Generating
from shardproof.train.rlhf.mixin import OfTokens, RlhfMixin, listen
from shardproof.train.rlhf.pictured_batches import ASKED, BESIDE, answered
from shardproof.train.rlhf.pictures import are_pictured, marks_of, with_others
from shardproof.train.rlhf.students_vllm import StudentsVllm


class Judged(RlhfMixin):
    """KTO. The mismatched answers, from which it estimates how far the model is from the reference, are made by
    turning the answers of a micro-batch round. TRL does that when it prepares the rows, so their order stays; and here
    a micro-batch is that of all ranks together, over which the estimate is averaged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("order_seed")
        batch, wanted, rows = kwargs["batch"], kwargs["args"], kwargs["train_dataset"]
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()  # that of `Dataset.shuffle`
        kwargs["train_dataset"] = rows.select(order)
        # Of rows with files TRL prepares nothing. Evaluation: see evaluation.py
        self._together = {"train_dataset": batch.micro * batch.readers, "eval_dataset": batch.micro}
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


class Contrasted(OfTokens):
    """ORPO, CPO and SimPO."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        beside = batch.get(BESIDE, {})

        def forward(ids: torch.Tensor, **options: Any) -> Any:
            return model(**{"input_ids": ids, **options, **beside})

        return super().concatenated_forward(forward, batch)


class Scored(OfTokens):
    """A reward model."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset if are_pictured(dataset) else super()._prepare_dataset(dataset, *args)


class Distilled(OfTokens):
    """GKD. TRL divides by the number of tokens in the rows as they were read, of all micro-batches of a step. Of
    answers that the student or the teacher writes that is another number, which nobody knows before the last of them:
    then it is the mean over the tokens of a micro-batch on all ranks.

    `sft_alpha`: the weight of learning answers as in sft besides, but for those that the student has written. `vllm`:
    what TRL's `VLLMGeneration` is made with, if one writes these."""

    lmbda: float  # of TRL

    def __init__(self, *args: Any, sft_alpha: float = 0.0, vllm: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._sft_alpha, self._by_student, self._at = sft_alpha, False, (-1, 0)
        super().__init__(*args, **kwargs)
        self._vllm = None if vllm is None else StudentsVllm(self, tokenizer_of(self.processing_class), vllm)
        self.model_accepts_loss_kwargs = True  # so tokens are counted: some models say that theirs does not
        if marks := marks_of(self.processing_class, self.model):
            self.generation_config.suppress_tokens = marks  # nothing would stand behind them

    def generate_on_policy_outputs(self, model: Any, inputs: dict[str, Any], generation_config: Any) -> Any:
        beside, of_prompts = inputs.get(BESIDE, {}), inputs.get(ASKED, {})
        self._by_student = model is not self.teacher_model
        if self._by_student and self._vllm is not None:
            self._meet()
            return self._vllm.answers(inputs["prompts"], inputs["prompt_attention_mask"], self.state.global_step)
        asked: Any = SimpleNamespace(generate=functools.partial(model.generate, **{**beside, **of_prompts}))
        made = super().generate_on_policy_outputs(asked, inputs, generation_config)
        more = made[0].shape[1] - inputs["prompts"].shape[1]  # tokens of answers, which are words
        inputs[BESIDE] = {**beside, **{name: answered(name, kinds, more) for name, kinds in of_prompts.items()}}
        return made

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL draws on each rank whether the student writes a micro-batch. A vLLM is asked by all ranks or by none, for
        weights are gathered for it, and a server takes the prompts of all: there one draw is that of all."""
        if self._vllm is None:
            return super().training_step(*args, **kwargs)
        step, lmbda = self.state.global_step, self.lmbda
        self._at = step, self._at[1] + 1 if self._at[0] == step else 0
        draws = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        writes = torch.rand(self._at[1] + 1, generator=draws)[-1] <= lmbda
        self.lmbda = 1.0 if writes else -1.0  # it never draws more than that, or less
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.lmbda = lmbda

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if BESIDE not in inputs:
            self.count_from_first_tokens(self.model, self.teacher_model)
        mine = inputs["labels"][:, 1:].ne(-100).sum()
        if not model.training:  # by itself
            share = mine.clamp(min=1)
        elif num_items_in_batch is not None and not (self.lmbda or self.seq_kd):
            share = torch.as_tensor(num_items_in_batch).clamp(min=1) / self.accelerator.num_processes
        else:
            share = self.accelerator.gather(mine).sum().clamp(min=1) / self.accelerator.num_processes
            if num_items_in_batch is not None:  # then Trainer does not divide by the micro-batches
                share = share * self.current_gradient_accumulation_steps
        own, self._by_student = self._by_student, False
        alpha = 0.0 if own and model.training else self._sft_alpha
        with also_given(inputs.get(BESIDE, {}), model, self.teacher_model):
            found = super().compute_loss(model, inputs, return_outputs or bool(alpha), share)
        if not alpha:
            return found
        loss, outputs = found
        logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten()
        loss = loss + alpha * torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / share
        return (loss, outputs) if return_outputs else loss


@contextlib.contextmanager
def also_given(more: dict[str, Any], *models: torch.nn.Module) -> Iterator[None]:
    """Inside, these models are called with these arguments, too."""
    with contextlib.ExitStack() as stack:
        for model in models if more else ():
            stack.enter_context(listen(model, lambda given: {**given, **more}))
        yield


_KINDS: dict[str, type[RlhfMixin]] = {
    "KTOTrainer": Judged,
    "ORPOTrainer": Contrasted,
    "CPOTrainer": Contrasted,
    "RewardTrainer": Scored,
    "GKDTrainer": Distilled,
    "GrpoTrainer": Generating,
    "RLOOTrainer": Generating,
    "PpoTrainer": Generating,
}


@functools.cache
def trainer_class(trainer: type[Any]) -> type[Any]:
    """The class that runs this trainer of TRL's in our commands."""
    mixin = _KINDS.get(trainer.__name__, RlhfMixin)
    return type(f"Sharded{trainer.__name__}", (mixin, trainer), {"__module__": __name__})
