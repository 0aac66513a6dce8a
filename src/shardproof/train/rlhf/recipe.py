"""Preference and reinforcement training, from top to bottom: prepare once, then train on every rank.

The algorithms are TRL's. Ours are the rows, their errors and order, the sharding of every model, and the output of a
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import shardproof
from shardproof.data.forms.preferences import JUDGED, PAIRS, PREFERENCE_FIELDS
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy
from shardproof.models.families.family import CAUSAL, TALKER
from shardproof.models.loading.classes import check_one_backbone
from shardproof.models.loading.packed import check_can_unpack
from shardproof.models.scorers import SCORER, VALUER
from shardproof.plugins import load
from shardproof.train import run
from shardproof.train.adapters.adding import new_adapters, with_adapters
from shardproof.train.adapters.beginning import takes_from_weights
from shardproof.train.adapters.begun import check_reference
from shardproof.train.checks.contradictions import check_columns
from shardproof.train.checks.named import check_named
from shardproof.train.folder import RunFolder
from shardproof.train.model.declared import check_shares_rows, declared
from shardproof.train.model.lacking import without_lacking
from shardproof.train.model.loading import (
    check_model_source,
    first_line,
    is_local,
    load_model,
    load_tokenizer,
    tokenizer_of,
)
from shardproof.train.model.made_anew import tell_made_anew
from shardproof.train.model.parts import choose_parts, in_bits
from shardproof.train.model.reward_models import check_reward_model, check_value_model, pads_with
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import FIPO, REWARDED, RlhfConfig
from shardproof.train.rlhf.against import check_can_go_on, check_ends, check_shared
from shardproof.train.rlhf.algorithms import ALGORITHMS, check_algorithm, check_cut, own_arguments
from shardproof.train.rlhf.chord import check_chord, encoded_experts, experts_of
from shardproof.train.rlhf.environments import check_environments, check_room, factory_of
from shardproof.train.rlhf.pictures import (
    ANSWERED,
    are_pictured,
    first_with_files,
    marks_of,
)
from shardproof.train.rlhf.rewards import check_rewarded, check_rewards, load_rewards, unrewarded
from shardproof.train.rlhf.rows import encode, form_of
from shardproof.train.rlhf.teachers import TeacherServer, check_teacher_server, check_topk
from shardproof.train.rlhf.tools import check_tools, load_tools
from shardproof.train.rlhf.variants import warn_of_dropout
from shardproof.train.rlhf.vllm import check_fits, check_server, of_student, room_of, vllm_generates
from shardproof.train.rows.media import check_backbone, media_limits
from shardproof.train.rows.plain import warn_of_plain
from shardproof.train.run import Prepared
from shardproof.train.settings import arguments, for_any_trainer, mixed_precision
from shardproof.train.watching.view import View, Write

OF_STATES = ("dpo", "kto", "grpo", "rloo", "ppo")  # their trainers ask the model for hidden states, not logits


@dataclass
class RlhfPrepared(Prepared):
    """A run that is ready to start. `experts`: rows that are learned beside answers, see `chord.py`."""

    experts: Any = field(default=None, init=False)

    @property
    def rows_a_step(self) -> int | Fraction:
        """In algorithms that generate, a batch counts answers, and each row gets several, so the number of rows may be
        a fraction."""
        if self.config.rlhf_type not in REWARDED:
            return self.batch.whole
        return Fraction(self.batch.whole, self.config.generations * self.config.num_iterations)


def check_rows(config: RlhfConfig, world_size: int) -> Batch:
    """Check what the options say about rows, for any algorithm."""
    check_named(config)
    check_columns(config.columns, PREFERENCE_FIELDS, others=config.rlhf_type in REWARDED)
    batch = run.check(config, world_size)
    check_tools(config)
    check_environments(config)
    check_cut(config)
    return batch


def check(config: RlhfConfig, world_size: int) -> Batch:
    """Check what can be known from the options alone; imports nothing heavy."""
    batch = check_rows(config, world_size)
    check_algorithm(config, batch)
    check_ends(config)
    check_shared(config)
    check_can_go_on(config)
    if config.adapters and (config.freeze or config.train_parts):
        raise ConfigError(  # after running the reference, PEFT makes all of them trainable again
            "--adapters and --freeze or --train-parts: rlhf continues training all adapters. Leave one of them out."
        )
    if TALKER in (config.train_parts or ()):
        raise ConfigError(
            f"--train-parts {TALKER}: rlhf compares or rewards text, and a {TALKER} learns speech codes in sft. "
            "Leave it out."
        )
    check_reference(config)
    check_chord(config)
    check_rewards(config.reward_funcs, config.format_pattern, plugins=bool(config.external_plugins))
    for option in ("ref_model", "teacher_model", "value_model", "reward_model"):
        named = getattr(config, option)
        for model in named if isinstance(named, list) else [named] if named is not None else []:
            check_model_source(model, flag(option))
            if is_local(model) and not config.external_plugins:
                check_can_unpack(model)
            if option == "reward_model" and is_local(model):
                check_reward_model(model)
    if config.rlhf_type in REWARDED:
        batch.unit = "answers"
    return batch


def check_scorer(config: RlhfConfig) -> None:
    """Raise ConfigError for a model that has to produce scores or values but cannot."""
    if config.rlhf_type == "rm":
        check_backbone(config, SCORER)
    if config.rlhf_type == "ppo":
        if config.value_model:
            check_value_model(config.value_model, config.trust_remote_code)
        check_backbone(config, VALUER, config.value_model)


def read(config: RlhfConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad.
    """
    return run.read(config, read_rows, form_of(config))


def prepare(config: RlhfConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Create the tokenizer and the output folder, and convert the rows from `read` to TRL's format.

    Raises:
        ConfigError, DataError: for everything a user can fix, before any process is started.
    """
    batch = check(config, world_size)
    check_rewarded(config, batch, rows, val_rows)
    if config.use_vllm and config.vllm_mode == "server":
        check_server(config)
    check_scorer(config)
    check_topk(config)
    if config.sequence_parallel > 1:
        check_shares_rows(config)
    _check_balance(config)
    warn_of_dropout(config)
    auto = SCORER if config.rlhf_type == "rm" else CAUSAL
    files_at = first_with_files(rows, val_rows)
    experts: list[Any] = []

    def to_learn(given: Any, processing: Any) -> Any:
        encoded = _encoded(config, given, processing, files_at)
        if given is rows:  # before the run folder is created
            experts.append(encoded_experts(config, tokenizer_of(processing)))
        return encoded

    prepared = run.prepare(config, batch, rows, val_rows, to_learn, RlhfPrepared, auto)
    prepared.experts = experts[0]
    answers = {PAIRS: " response=chosen rejected_response=rejected", JUDGED: " response=completion"}
    warn_of_plain(rows, prepared.tokenizer, f"query=prompt{answers.get(form_of(config), '')}")
    return _on_disk(prepared) if config.precompute_ref else prepared


def _encoded(config: RlhfConfig, rows: Any, processing: Any, files_at: str) -> Any:
    encoded = encode(config, rows, processing, files_at)
    check_fits(config, encoded)
    check_teacher_server(config, processing, encoded.report)
    return encoded


def _check_balance(config: RlhfConfig) -> None:
    """Check that a load-balancing loss works: TRL needs `num_experts` for it, and router outputs have no gradient
    inside reentrant checkpoints."""
    found, kind = declared(config), config.rlhf_type
    if found is None:
        return
    text = found.get_text_config()
    asked, option = config.router_aux_loss_coef, "--router-aux-loss-coef"
    by_config = kind in ("orpo", "simpo", "cpo") and getattr(text, "output_router_logits", False)
    if not asked and not (by_config and getattr(text, "router_aux_loss_coef", 0)):
        return
    off = f"leave {option} out." if asked else "set router_aux_loss_coef to 0 in the model's config.json."
    if config.checkpointing_reentrant:
        raise ConfigError(
            f"--checkpointing-reentrant: the loss of {kind} has a load-balancing term for the experts of"
            f" {config.model}, and router outputs have no gradient inside reentrant checkpoints.\nLeave"
            f" --checkpointing-reentrant out, or {off}"
        )
    if asked and not (hasattr(text, "output_router_logits") and hasattr(text, "num_experts")):
        raise ConfigError(
            f"{option}: TRL has no load-balancing loss for models of this kind ({text.model_type}). Leave it out."
        )


def _on_disk(prepared: Prepared) -> Prepared:
    """Store the rows on disk: TRL writes what it computes once beside them, where every rank must find it."""
    import datasets

    with RunFolder(prepared.folder).discarded_if_it_fails():
        for name, rows in (("rows", prepared.rows), ("val_rows", prepared.val_rows)):
            if rows is not None:
                place = str(RunFolder(prepared.folder).rows / name)
                rows.save_to_disk(place)
                stored = datasets.load_from_disk(place)
                stored.report, stored.places = rows.report, rows.places
                setattr(prepared, name, stored)
    return prepared


# --- training ----------------------------------------------------------------------------------------


def import_libraries(config: RlhfConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.rlhf.trainers  # noqa: F401

    ALGORITHMS[config.rlhf_type].classes()


def train(prepared: RlhfPrepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the current step, and its weights are saved.

    Returns: the signal that ended training, or 0.
    """
    from shardproof.train.rlhf.trainers import trainer_class

    config: RlhfConfig = prepared.config
    kind = config.rlhf_type
    trl_trainer, trl_arguments = ALGORITHMS[kind].classes()
    scored, pictured = kind == "rm", are_pictured(prepared.rows)
    head: dict[str, Any] = {"num_labels": 1} if scored else {}
    auto = SCORER if scored else CAUSAL
    # TRL caches what it precomputes under a name made from the weights, so these are loaded in full for it.
    model = load_model(prepared.model, config, auto, config.model_type, to_shard=not config.precompute_ref, **head)
    if scored:
        pads_with(model, prepared.tokenizer.pad_token_id)
    model = in_bits(model, config)
    if pictured and kind in OF_STATES:
        check_one_backbone(model, "TRL")
    task = "SEQ_CLS" if scored else "CAUSAL_LM"
    config = without_lacking(config, anatomy(model).parts)  # models of plugins are checked only here
    new = None
    if config.adapters or takes_from_weights(config):  # TRL's reference then holds a copy of the initial adapters
        model = with_adapters(model, config, task)
    elif config.tuner != "full":
        new = new_adapters(config, task, model, choose_parts(model, config))
    else:
        choose_parts(model, config)

    own, marks, collating = own_arguments(config, prepared.batch), marks_of(prepared.processing, model), {}
    if pictured and kind in ANSWERED:
        from shardproof.train.rlhf.pictured_batches import collator_for

        collating["data_collator"] = collator_for(prepared.rows, kind, config.max_length, marks)
    if kind in REWARDED and (marks or (config.stop_words and config.use_vllm)):
        without = {"suppress_tokens": marks}
        own["generation_kwargs"] = vllm_generates(marks, config.stop_words) if config.use_vllm else without
    if kind in REWARDED and config.use_vllm and config.vllm_mode == "colocate":
        own["vllm_max_model_length"] = room_of(config, model.config)

    def make_trainer(callbacks: list[Any], reporter: Any) -> Any:
        try:
            return trainer_class(trl_trainer)(
                model=model,
                args=trl_arguments(**arguments(prepared), **own, bf16=False),
                processing_class=prepared.processing if pictured else prepared.tokenizer,
                **collating,
                peft_config=new,
                ref_adapters=config.ref_adapters,
                **for_any_trainer(prepared, callbacks),
                frozen_stage=config.frozen_stage,
                frozen_precision=_precision(config.frozen_precision),
                reporter=reporter if config.log_completions else None,
                **_other_models(prepared, model),
            )
        except ValueError as error:  # TRL and PEFT check their arguments
            raise ConfigError(f"--rlhf-type {kind}: {first_line(error)}") from error

    return run.train(prepared, model, make_trainer, view, write, signals)


def _precision(name: str | None) -> Any:
    """The precision of a model that is not trained. None leaves it to --precision; fp32 overrides that."""
    if name == "fp32":
        import torch

        return shardproof.MixedPrecision(compute=torch.float32)
    return mixed_precision(name) if name else None


def _load_other(
    name: str, source: str, config: RlhfConfig, kind: str = CAUSAL, to_shard: bool = True, **more: Any
) -> Any:
    """The model of this option, marked with how to shard it."""
    from shardproof.integrations.prepared import shard_as

    if kind != CAUSAL or getattr(config, name):  # its class may differ from the one that was checked
        config = config.model_copy(update={"padding_free": False, "sequence_parallel": 1})
    model = load_model(source, config, kind, to_shard=to_shard, **more)
    tell_made_anew(model, source, trained=name == "value_model")
    precision = _precision(config.model_precisions.get(name))
    return shard_as(model, config.model_stages.get(name), precision, config.model_offloads.get(name))


def _reads(config: RlhfConfig, rows: Any, judge: str) -> Any:
    """The processing class of a reward model: None for conversations that are text only."""
    from shardproof.models.loading.processors import load_processor
    from shardproof.train.rlhf.judging import Reads, ReadsTexts

    if not are_pictured(rows):
        return ReadsTexts(load_tokenizer(judge, config)) if isinstance(rows[0]["prompt"], str) else None
    processor = load_processor(judge, config.trust_remote_code)
    return Reads(processor, media_limits(config, processor))


def _other_models(prepared: RlhfPrepared, model: Any) -> dict[str, Any]:
    """The models and functions of the run besides the trained model."""
    from shardproof.train.rlhf.fipo import Fipo

    config: RlhfConfig = prepared.config
    kind = config.rlhf_type
    more: dict[str, Any] = {"stop_words": config.stop_words} if config.stop_words else {}
    head: dict[str, Any] = {"num_labels": 1}
    if kind in REWARDED:
        functions = load_rewards(
            config.reward_funcs,
            config.format_pattern,
            config.max_completion_length,
            load(config.external_plugins),
            alone=not (config.reward_model or config.environments),
        )
        if config.by_teacher_alone:
            functions = [unrewarded]
        judges = [_load_other("reward_model", m, config, SCORER, **head) for m in config.reward_model]
        more["reward_funcs"] = [*functions, *judges]
        if judges:
            read = [_reads(config, prepared.rows, model) for model in config.reward_model]
            more["reward_processing_classes"] = [*(None for _ in functions), *read]
        if config.dynamic_sample:
            more["resamples"] = config.max_resample_times
        if config.tools:
            more["tools"] = load_tools(config.tools)
        if config.environments:
            more["environment_factory"] = factory_of(config.environments)
            more["check_prompts"] = partial(check_room, config.environments, config.max_length)
        if config.tuner == "full":
            more["make_reference"] = partial(
                _load_other, "ref_model", prepared.model, config, model_type=config.model_type
            )
    if config.ref_model or (kind in ("dpo", "kto") and config.tuner == "full" and not config.precompute_ref):
        source = config.ref_model or prepared.model
        more["ref_model"] = _load_other("ref_model", source, config, to_shard=not config.precompute_ref)
    if config.teacher_model:
        more["teacher_model"] = _load_other("teacher_model", config.teacher_model, config)
    if config.teacher_model_server:
        more["teacher_model"] = TeacherServer(config.teacher_model_server, config.gkd_logits_topk or 0)
    if kind == "grpo":
        more["experts"] = experts_of(config, prepared.experts, prepared.tokenizer.pad_token_id)
        if config.loss_type == ["fipo"]:
            more["fipo"] = Fipo(
                **{name.removeprefix("fipo_"): getattr(config, name) for name in FIPO}, delta=config.delta
            )
    if kind == "gkd":
        more |= {"sft_alpha": config.sft_alpha, "topk": config.gkd_logits_topk}
        if config.use_vllm:
            more["vllm"] = of_student(config, model.config, prepared.batch.micro)
    if kind == "ppo":
        source = config.value_model or prepared.model
        more["value_model"] = value = _load_other("value_model", source, config, VALUER, **head)
        pads_with(value, prepared.tokenizer.pad_token_id)
        choose_parts(value, SftConfig())  # a talker has no values
    return more
