"""TRL's trainers that generate answers, as `shardproof rlhf` runs them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from shardproof.errors import CheckpointError
from shardproof.interrupts import left_to_rank
from shardproof.train.rlhf.advantages import weighted
from shardproof.train.rlhf.ends import EndsSampled
from shardproof.train.rlhf.judging import Reads
from shardproof.train.rlhf.mixin import RlhfMixin, listen, plain_of
from shardproof.train.rlhf.pictures import NUMBER, are_pictured, in_parts
from shardproof.train.rlhf.prompted import Prompted
from shardproof.train.rlhf.resampling import WORTH, with_others
from shardproof.train.rlhf.shared_answers import as_dealt_out, of_group
from shardproof.train.trainer import CommandMixin
from shardproof.zero.device import widest_float

log = logging.getLogger("shardproof")
IMAGES, STEP = "images", "step"  # a field of TRL's log of answers, and ours: the step in which they were generated
ALIKE = 10  # consecutive batches in which the answers to each question have equal rewards: too many to be chance


class Generating(EndsSampled):
    """GRPO, RLOO and PPO. TRL distributes the prompts, so that each answer to a prompt is compared with the others.

    `make_reference` returns the reference, if one is needed that is not the model without its adapters: TRL would load
    the full model on every rank. `resamples`: how often other questions are asked at most, see `resampling.py`.
    `check_prompts` raises if environments have made a prompt too long: it gets the tokens of prompts, and their
    environments.
    """

    _logs: dict[str, Any]  # of TRL
    teacher_model: Any = None  # the one that judges tokens

    def __init__(
        self,
        *args: Any,
        make_reference: Callable[[], Any] | None = None,
        resamples: int = 0,
        check_prompts: Callable[[Any, Any], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self.resamples, self._check_prompts = resamples, check_prompts
        self._warned, self._alike = set[str](), 0
        self._tools: list[Any] = []
        self._prompted: Prompted | None = None
        # Row numbers of both datasets overlap, and answers to training rows may still have to be learned after an
        # evaluation.
        rows = {True: kwargs["train_dataset"], False: kwargs["eval_dataset"]}
        self._prompts = {mode: Prompted(some) for mode, some in rows.items() if some is not None and are_pictured(some)}
        kwargs["args"] = wanted = as_dealt_out(kwargs["args"], kwargs["batch"].sequence)
        self._draws: torch.Tensor | None = None
        reference = None
        if make_reference is not None and wanted.beta:
            reference = make_reference()  # this sets the seed; TRL's trainer then has each rank draw its own numbers
            kwargs["args"] = copy.copy(wanted)
            kwargs["args"].beta, kwargs["args"].sync_ref_model = 0.0, False
        super().__init__(*args, **kwargs)
        self._forget_answers()
        if reference is not None:
            self._refer_to(reference, wanted)

    def _forget_answers(self) -> None:
        """Clear the answers that are logged. TRL keeps those of one batch, but there may be several batches between two
        logs. Images are not logged."""
        for name, values in self._logs.items():
            self._logs[name] = (
                defaultdict(deque) if isinstance(values, dict) else deque(maxlen=0 if name == IMAGES else None)
            )
        self._logs[STEP] = deque()

    def _refer_to(self, reference: Any, wanted: Any) -> None:
        """Do what TRL does with a reference that it loads itself."""
        self.args.beta, self.args.sync_ref_model = wanted.beta, wanted.sync_ref_model
        self.beta = wanted.beta
        if wanted.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(reference, temperature=self.temperature)
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if wanted.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))

    def _tokenize_prompts(self, prompts: Any) -> Any:
        if self._prompted is not None:
            ids, fields = self._prompted.asked()
            return ids, None, fields
        if not any(self._tools):
            found = super()._tokenize_prompts(prompts)
            if self._check_prompts is not None:
                self._check_prompts(found[0], self._batch_environments)
            return found
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.chat_template_kwargs}
        together = zip(prompts, self._tools, strict=True)
        written = [self.processing_class.apply_chat_template(p, tools=tools, **how) for p, tools in together]
        return [tokens["input_ids"] for tokens in written], None, {}

    def _generate_single_turn(self, ids: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        if self._prompted is not None and self.use_vllm:
            # None for a row without images: with a colocated vLLM, TRL reads the first item even of an empty list.
            images = [of_row["image"] or None for of_row in self._prompted.files]
        return super()._generate_single_turn(ids, images, *args, **kwargs)

    def _calculate_rewards(self, inputs: Any, *args: Any) -> Any:
        if self._prompted is not None:
            inputs = [row | files for row, files in zip(inputs, self._prompted.columns, strict=True)]
            for reads in self.reward_processing_classes:
                if isinstance(reads, Reads):
                    reads.files, reads.where = self._prompted.files, self._prompted.where
        found: torch.Tensor = super()._calculate_rewards(inputs, *args)
        self._warn_of_unjudged(found)
        self._worth = found  # from all ranks
        return found.to(widest_float(found.device))  # as in `weighted`

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **more: Any
    ) -> Any:
        ask = functools.partial(super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask)
        prompted, rows = self._prompted, batch_size or len(input_ids)
        if prompted is None:
            return ask(logits_to_keep, batch_size, **more)
        before, device = input_ids.shape[1] - logits_to_keep, input_ids.device
        calls = (prompted.now[i : i + rows] for i in range(0, len(input_ids), rows))  # of the model, in order
        with listen(model, lambda inputs: inputs | prompted.given(next(calls), before, logits_to_keep, device)):
            return ask(logits_to_keep, batch_size, **more)

    def beside(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the model besides the tokens, for a batch of all current rows."""
        if self._prompted is None:
            return {}
        before, behind = (batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
        return self._prompted.given(self._prompted.now, before, behind, batch["prompt_ids"].device)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._prompted = self._prompts.get(self.model.training)
        if self._prompted is not None:
            self._prompted.now = inputs[NUMBER].tolist()
        return super()._compute_loss(model, inputs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluates answers that are generated for it, in groups."""
        return super(RlhfMixin, self).evaluation_loop(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return super(CommandMixin, self).get_train_dataloader()

    def _get_dataloader(self, *args: Any, batch_size: int, is_training: bool = False, **kwargs: Any) -> DataLoader[Any]:
        """The loader for training and evaluation. Its rows draw no random numbers, so it does not need the seed from
        transformers. Where ranks share answers, each of them generates a part."""
        kwargs["batch_size"] = batch_size // self.batch_plan.sequence if is_training else batch_size
        loader: Any = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        # Accelerate's own loader only distributes what this one reads.
        loader.base_dataloader.worker_init_fn = left_to_rank
        return loader

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def kept_by_rank(self) -> dict[str, Any]:
        """Includes answers that are still to be learned from."""
        written, learnt = divmod(self._step, self._lasting)
        told = {**self._logs, "prompt": [_told(prompt) for prompt in self._logs["prompt"]]}
        return {
            **super().kept_by_rank(),
            "written": written,  # how many generations of answers have been used up
            "learnt": learnt,
            "epochs": int(self.state.epoch or 0.0),
            "ranks": self.args.world_size,
            "sharing": self.batch_plan.sequence,
            "left": plain_of(self._buffered_inputs) if learnt else None,
            "answers": plain_of({name: told[name] for name in told if name != IMAGES}) if told[STEP] else None,
        }

    @property
    def _lasting(self) -> int:
        """How many micro-batches learn from the same answers, which TRL generates in the first of them."""
        return int(self.args.steps_per_generation * self.args.num_iterations)

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        super().take_kept_by_rank(kept)
        # The last step of an epoch may have fewer micro-batches, and another number of ranks has other micro-batches.
        self._step = kept["written"] * self._lasting + kept["learnt"]
        for _ in range(kept["epochs"]):  # TRL's sampler draws every order from the same generator
            next(iter(self._sampler), None)
        if kept["answers"] is not None:  # they are logged next time
            _extend(self._logs, kept["answers"])
        if kept["left"] is None:
            return
        there = kept["ranks"], len(kept["left"]), kept.get("sharing", 1)
        here = self.args.world_size, self.args.steps_per_generation, self.batch_plan.sequence
        if there != here:
            raise CheckpointError(
                f"The checkpoint holds answers that {there[0]} ranks still have to learn from, in {there[1]}"
                f" micro-batches{_shared(there[2])}, but this run has {here[0]} rank(s) and"
                f" {here[1]}{_shared(here[2])}."
                " Resume with the same numbers, or choose --save-steps so that all answers have been learned from"
                " when a checkpoint is written."
            )
        self._buffered_inputs = _on(self.args.device, kept["left"])

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's method, which generates answers and distributes them to micro-batches in a random order."""
        shares = self.recorder.sequence
        with contextlib.nullcontext() if shares is None else shares.left():
            found = super()._prepare_inputs(generation_batch)
        draws, self._draws = self._draws, None
        if draws is not None:
            torch.set_rng_state(draws)
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = self._with_others(inputs) if self.resamples and self.model.training else self._written(inputs)
        if self.recorder.sequence is None or not self.model.training:
            return made
        self._meet()
        made, seed = of_group(made, self.recorder.sequence, self._tokenizer.pad_token_id)
        self._draws = torch.get_rng_state()  # for answers, which differ on each rank; the order is the same on all
        torch.default_generator.manual_seed(seed)
        return made

    def _with_others(self, inputs: Any) -> Any:
        made = self._written(inputs)
        rank, pad = self.accelerator.process_index, self.processing_class.pad_token_id
        more = self._more(len(inputs))
        return with_others(made, self.num_generations, more, self._written, self._of_all, rank, pad)

    def _of_all(self, rows: list[Any]) -> list[Any]:
        self._meet()  # gathered without the accelerator
        gathered: list[Any] = gather_object(rows)
        return gathered

    def _more(self, size: int) -> Iterator[list[Any]]:
        """Further questions for this rank, for `size` answers at a time. Their order is separate, and the same in a
        resumed run and on any number of ranks, which have other micro-batches."""
        rows, rank, answers = self.train_dataset, self.accelerator.process_index, self.num_generations
        draws = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self._step // self.args.steps_per_generation)
        for _ in range(self.resamples):
            order = torch.randperm(len(rows), generator=draws).tolist()
            places = [order[(rank * size + i) // answers % len(order)] for i in range(size)]
            yield [rows[place] for place in places]

    def _written(self, inputs: Any) -> Any:
        self.finite.check_weights()  # otherwise sampling a token fails with an error that does not give the cause
        self._tools = [row.get("tools") for row in inputs]  # TRL only supports tools that are functions passed to it
        self._prompted = self._prompts.get(self.model.training)
        if self._prompted is None:
            teacher = self.teacher_model if isinstance(self.teacher_model, torch.nn.Module) else None
            self.count_from_first_tokens(self.model, self.ref_model, teacher, *self.also_trained)
            output = super()._generate_and_score_completions(inputs)
        else:
            output = super()._generate_and_score_completions(self._prompted.begin(inputs))
            output |= {NUMBER: torch.tensor(self._prompted.now)}
        output["advantages"] = output["advantages"].float()
        if self.resamples and self.model.training:
            output[WORTH] = self._worth_of(len(inputs))
        step = self.state.global_step + self.model.training  # the step that begins
        self._logs[STEP].extend([step] * (len(self._logs["completion"]) - len(self._logs[STEP])))
        return output

    def _worth_of(self, answers: int) -> torch.Tensor:
        """The rewards of this rank's answers: in total, or by judge if TRL compares them by judge."""
        by_each = getattr(self.args, "multi_objective_aggregation", "") == "normalize_then_sum"
        worth = self._worth if by_each else weighted(self._worth, self.reward_weights)[:, None]
        return worth[self.accelerator.process_index * answers :][:answers]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._warn_of_cut()
        self._warn_of_alike()
        self._warn_of_calls()
        super().log(logs, start_time)
        if self.reporter is not None:
            prompts = [_told(prompt) for prompt in self._logs["prompt"]]
            self.reporter.generated({**self._logs, "prompt": prompts})
        self._forget_answers()

    def _warn_once(self, of: str, text: str, *values: Any) -> None:
        if of not in self._warned and self.accelerator.is_main_process:
            log.warning(text, *values)
        self._warned.add(of)

    def _warn_of_unjudged(self, rewards: torch.Tensor) -> None:
        """Warn if no judge gave a reward to an answer. `rewards`: those of all ranks, by judge. Without environments,
        `Judges` reports this on each rank."""
        silent = int(torch.isnan(rewards).all(dim=1).sum()) if getattr(self, "environments", None) else 0
        if silent:
            self._warn_once(
                "unjudged",
                "Nothing judged %d of %d answers: each of %s gave None, and nothing is learned from them.",
                silent,
                len(rewards),
                ", ".join(self.reward_func_names),
            )

    def _warn_of_cut(self) -> None:
        """Warn if nothing is learned from any answer since the last log: the loss is then 0, which may look like
        success."""
        shares = self._metrics["train"].get("completions/clipped_ratio")  # from all ranks
        if self.mask_truncated_completions and shares and min(shares) >= 1:
            self._warn_once(
                "cut",
                "All answers since the last log, up to step %d, were cut at --max-completion-length %d, and with"
                " --mask-truncated-completions nothing is learned from them: the loss is 0. Raise"
                " --max-completion-length, or leave --mask-truncated-completions out until answers end by themselves.",
                self.state.global_step,
                self.max_completion_length,
            )

    def _warn_of_alike(self) -> None:
        """Warn if for many batches in a row all answers to each question had the same reward. PPO, which also trains
        values, does not compare them, and a teacher judges tokens."""
        shares = self._metrics["train"].get("frac_reward_zero_std")  # from all ranks
        if not shares or not self.model.training or self.also_trained or self.teacher_model is not None:
            return
        differ = [place for place, share in enumerate(shares, 1) if share < 1]
        self._alike = len(shares) - differ[-1] if differ else self._alike + len(shares)
        if self._alike >= ALIKE:
            self._warn_once(
                "alike",
                "In the last %d batches, up to step %d, all answers to each question had the same reward (%g on"
                " average in the last one): nothing was learned from them%s. Check that --reward-funcs and"
                " --reward-model can tell these answers apart; they are in completions.jsonl. If the questions are too"
                " easy or too hard, use others; if all answers are identical, raise --temperature.",
                self._alike,
                self.state.global_step,
                self._metrics["train"]["reward"][-1],
                " except to stay near the reference" if self.beta else "",
            )

    def _warn_of_calls(self) -> None:
        """Warn if all function calls since the last log failed: the model is told so, and answers continue."""
        found = self._metrics["train"]  # from all ranks
        how_often = zip(found.get("tools/call_frequency", ()), found.get("tools/failure_frequency", ()), strict=False)
        failed = [share for calls, share in how_often if calls]
        if failed and min(failed) >= 1:
            turns = (turn for answer in self._logs["completion"] for turn in answer if turn["role"] == "tool")
            self._warn_once(
                "calls",
                "All calls of %s since the last log, up to step %d, failed%s. The model was told so, and the answers"
                " continued: they are in completions.jsonl.",
                "--tools" if self._standalone_tools else "--environments",
                self.state.global_step,
                next((f", one with {turn['content']}" for turn in turns), ""),
            )


def _shared(ranks: int) -> str:
    return f" of rows that {ranks} share" if ranks > 1 else ""


def _told(prompt: Any) -> Any:
    """A prompt without its images, of which only the positions are logged."""
    if isinstance(prompt, str):
        return prompt
    return [in_parts(turn) if isinstance(turn["content"], list) else turn for turn in prompt]


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
