"""GKD: a student learns a teacher's distributions, on given answers or on answers that one of the two generates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.utils import DataCollatorForChatML

from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.likeliest import distance, likeliest
from shardproof.train.losses.shortcuts import check_logits, head_of, hidden_states
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.rlhf.behind import BEHIND
from shardproof.train.rlhf.ends import EndsAnswers
from shardproof.train.rlhf.mixin import listen
from shardproof.train.rlhf.pictured_batches import ASKED, BESIDE, answered
from shardproof.train.rlhf.pictures import marks_of
from shardproof.train.rlhf.students_vllm import StudentsVllm
from shardproof.train.rlhf.teachers import TeacherServer


class Distilled(EndsAnswers):
    """GKD's trainer. TRL divides the loss by the number of tokens in the rows of all micro-batches of a step. If the
    student or the teacher generates the answers, their number of tokens differs and is only known after the last of
    them, so the loss is then the mean over the tokens of a micro-batch on all ranks.

    `sft_alpha`: the weight of an additional sft loss on answers that the student has not generated. `vllm`: the
    arguments of TRL's `VLLMGeneration`, if vLLM generates the student's answers. `topk`: compare the two only on this
    many of the teacher's likeliest tokens, without holding the logits of either; by default on the full vocabulary,
    which a `TeacherServer` does not support."""

    lmbda: float  # set by TRL
    beta: float
    teacher_model: Any

    def __init__(
        self,
        *args: Any,
        sft_alpha: float = 0.0,
        vllm: dict[str, Any] | None = None,
        topk: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._sft_alpha, self._by_student, self._at = sft_alpha, False, (-1, 0)
        self._topk, self._tried, teacher = topk, False, kwargs["teacher_model"]
        if topk is not None:
            kwargs["teacher_model"] = _StandIn(kwargs["model"].config)
        asked = tokenizer_of(kwargs["processing_class"])
        kwargs.setdefault("data_collator", AsInSft(asked, kwargs["args"].max_length))
        super().__init__(*args, **kwargs)
        self._server = teacher if isinstance(teacher, TeacherServer) else None
        if topk is not None:
            there = self._server is None
            self.teacher_model = self.accelerator.prepare_model(teacher, evaluation_mode=True) if there else None
        self._vllm = None if vllm is None else StudentsVllm(self, tokenizer_of(self.processing_class), vllm)
        self.model_accepts_loss_kwargs = True  # so that tokens are counted: some models claim not to support it
        if marks := marks_of(self.processing_class, self.model):
            self.generation_config.suppress_tokens = marks  # there would be no files for them

    def generate_on_policy_outputs(self, model: Any, inputs: dict[str, Any], generation_config: Any) -> Any:
        beside, of_prompts = inputs.get(BESIDE, {}), inputs.get(ASKED, {})
        self._by_student = model is not self.teacher_model
        if self._by_student and self._vllm is not None:
            self._meet()
            return self._vllm.answers(inputs["prompts"], inputs["prompt_attention_mask"], self.state.global_step)
        generate = functools.partial(model.generate, **{**beside, **of_prompts})
        ends = self.ends
        asked: Any = SimpleNamespace(generate=ends.asked(generate) if ends else generate)
        made = super().generate_on_policy_outputs(asked, inputs, generation_config)
        asks = inputs["prompts"].shape[1]
        for ids, mask, labels in zip(*made, strict=True):
            if ends and (length := ends.tokens(ids[asks:].tolist())) is not None:
                mask[asks + length :], labels[asks + length :] = 0, -100
        more = made[0].shape[1] - asks  # tokens of answers, which are text
        inputs[BESIDE] = {**beside, **{name: answered(name, kinds, more) for name, kinds in of_prompts.items()}}
        return made

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL draws on each rank whether the student generates the answers of a micro-batch. vLLM has to be called by
        all ranks or by none, since weights are gathered for it and a server takes the prompts of all ranks. With vLLM,
        all ranks therefore use the same draw."""
        if self._vllm is None:
            return super().training_step(*args, **kwargs)
        step, lmbda = self.state.global_step, self.lmbda
        self._at = step, self._at[1] + 1 if self._at[0] == step else 0
        draws = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        writes = torch.rand(self._at[1] + 1, generator=draws)[-1] <= lmbda
        self.lmbda = 1.0 if writes else -1.0  # so that TRL's own draw, from 0 to 1, changes nothing
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
        if not model.training:  # each rank by itself
            share = mine.clamp(min=1)
        elif num_items_in_batch is not None and not (self.lmbda or self.seq_kd):
            share = torch.as_tensor(num_items_in_batch).clamp(min=1) / self.accelerator.num_processes
        else:
            share = self.accelerator.gather(mine).sum().clamp(min=1) / self.accelerator.num_processes
            if num_items_in_batch is not None:  # in this case Trainer does not divide by the number of micro-batches
                share = share * self.current_gradient_accumulation_steps
        own, self._by_student = self._by_student, False
        alpha = 0.0 if own and model.training else self._sft_alpha
        if self._topk is not None:
            self._try(model, inputs)
            self.count(model, inputs)
            with also_given(inputs.get(BESIDE, {}), model, self.teacher_model):
                loss = self._of_likeliest(model, inputs, self._topk, share, alpha)
            self._allow_backward(loss)
            return (loss, {}) if return_outputs else loss
        with also_given(inputs.get(BESIDE, {}), model, self.teacher_model):
            found = super().compute_loss(model, inputs, return_outputs or bool(alpha), share)
        if not alpha:
            return found
        loss, outputs = found
        logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten()
        loss = loss + alpha * torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / share
        return (loss, outputs) if return_outputs else loss

    def _try(self, model: Any, inputs: dict[str, Any]) -> None:
        """Check once that both models compute their logits with their heads alone."""
        for asked in () if self._tried else filter(None, (model, self.teacher_model)):
            check_logits(asked, inputs, "--gkd-logits-topk")
        self._tried = True

    def _of_likeliest(self, model: Any, inputs: dict[str, Any], topk: int, share: Any, alpha: float) -> torch.Tensor:
        """The divergence on the teacher's likeliest tokens, plus the sft loss with `alpha`. TRL would compute full
        logits for them."""
        learnt = inputs["labels"][:, 1:].ne(-100)
        taught = self._taught(inputs, learnt, topk)  # first, while no activations are held for backward
        hidden, head = _learnt_from(model, inputs, learnt), head_of(model)
        apart = functools.partial(self.generalized_jsd_loss, beta=self.beta, reduction="sum")
        loss = distance(hidden, head.weight, head.bias, taught, share, apart)
        if not alpha:
            return loss
        targets = inputs["labels"][:, 1:][learnt]
        return loss + alpha * chunked_cross_entropy(hidden, head.weight, head.bias, targets, share)

    @torch.no_grad()
    def _taught(self, inputs: dict[str, Any], learnt: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's values for its likeliest tokens at the positions in `learnt` (B, T - 1), and their ids."""
        known = head_of(self.model).out_features
        if self._server is not None:
            return self._server.likeliest(inputs["input_ids"], inputs["attention_mask"], learnt, known)
        self.teacher_model.eval()
        head = head_of(self.teacher_model)
        hidden = _learnt_from(self.teacher_model, inputs, learnt)
        return likeliest(hidden, head.weight, head.bias, topk, known)


class AsInSft:
    """TRL's collator for conversations, which has everything after a question learned. Here, as in sft, text that the
    template writes after the end of an answer is not learned."""

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self._collate = DataCollatorForChatML(tokenizer=tokenizer, max_length=max_length)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self._collate(examples)
        for row, example in enumerate(examples):
            places = batch["attention_mask"][row].nonzero()[:, 0]
            batch["labels"][row, places[len(places) - example[BEHIND] :]] = -100
        return batch


class _StandIn(torch.nn.Module):
    """A placeholder for the teacher. TRL compares full vocabularies and checks that both have the same number of rows;
    with one tokenizer, their padding may differ."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self._is_accelerate_prepared = config, True  # there is nothing to shard


def _learnt_from(model: Any, inputs: dict[str, Any], learnt: torch.Tensor) -> torch.Tensor:
    """The hidden states from which a model computes the logits of learned tokens [tokens, width]."""
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return hidden_states(model, given)[:, :-1][learnt]


@contextlib.contextmanager
def also_given(more: dict[str, Any], *models: torch.nn.Module | None) -> Iterator[None]:
    """Inside the context, these models are also passed these arguments."""
    with contextlib.ExitStack() as stack:
        for model in filter(None, models) if more else ():
            stack.enter_context(listen(model, lambda given: {**given, **more}))
        yield
