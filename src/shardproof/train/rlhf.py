"""Preference and reinforcement training, from top to bottom: prepare once, then train on every rank.

The algorithms are TRL's. Ours: rows and their errors, sharding of every model, their order, what a run leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import shardproof
from shardproof.data.formats import Form, kind_of
from shardproof.data.parts import Problem
from shardproof.data.preferences import JUDGED, PAIRS, PREFERENCE_FIELDS, PROMPTS
from shardproof.data.rows import BadRow, pass_over, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.plugins import load
from shardproof.train import run
from shardproof.train.algorithms import ALGORITHMS, check_algorithm, own_arguments
from shardproof.train.config import Batch
from shardproof.train.folder import RunFolder
from shardproof.train.models import check_model_source, first_line, is_local, load_model, lora, tokenizer_of
from shardproof.train.parts import choose_parts
from shardproof.train.pictures import (
    PICTURED,
    are_pictured,
    check_model,
    check_trainer,
    encode_pictured,
    have_files,
    processing_for,
)
from shardproof.train.reward_calls import TAKEN
from shardproof.train.reward_models import check_reward_model
from shardproof.train.rewards import check_rewarded, check_rewards, load_rewards
from shardproof.train.rlhf_config import REWARDED, RlhfConfig
from shardproof.train.run import Prepared, View, Write
from shardproof.train.vllm import check_server

CLASSIFIER = "AutoModelForSequenceClassification"


@dataclass
class RlhfPrepared(Prepared):
    """A run that can start."""

    @property
    def rows_a_step(self) -> int:
        """Of algorithms that generate, a batch counts answers, of which each row gets several."""
        if self.config.rlhf_type not in REWARDED:
            return self.batch.whole
        return max(self.batch.whole // (self.config.generations * self.config.num_iterations), 1)


def check(config: RlhfConfig, world_size: int) -> Batch:
    """What can be known from the options alone; imports nothing heavy."""
    if not config.dataset:
        raise ConfigError("--dataset is missing: name a file with rows to train on.")
    run.check_columns(config.columns, PREFERENCE_FIELDS)
    batch = run.check(config, world_size)
    check_algorithm(config, batch)
    check_can_go_on(config)
    check_rewards(config.reward_funcs, config.format_pattern, plugins=bool(config.external_plugins))
    for option in ("ref_model", "teacher_model", "value_model", "reward_model"):
        named = getattr(config, option)
        for model in named if isinstance(named, list) else [named] if named is not None else []:
            check_model_source(model, "--" + option.replace("_", "-"))
            if option == "reward_model" and is_local(model):
                check_reward_model(model)
    if config.rlhf_type in REWARDED:
        batch.unit = "answers"
    return batch


def check_can_go_on(config: RlhfConfig) -> None:
    """Raise ConfigError for a run that could not be the same after a checkpoint."""
    if config.resume is None and (config.save_only_model or not config.save_steps):
        return
    why = None
    if config.rlhf_type == "ppo":
        why = "--rlhf-type ppo trains two models, and a checkpoint holds one"
    if config.sync_ref_steps:
        why = "--sync-ref-steps moves the reference, which is not in a checkpoint"
    if config.precompute_ref:
        why = "--precompute-ref asks the model as it was before the first step, which is gone when a run goes on"
    if why:
        raise ConfigError(f"{why}: leave out --save-steps and --resume, or add --save-only-model.")


def read(config: RlhfConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad.
    """
    return run.read(config, read_rows, form_of(config))


def form_of(config: RlhfConfig) -> Form:
    """What rows look like. Where all answers are written anew, a teacher's pupil needs none in the rows."""
    if config.rlhf_type == "gkd" and (config.seq_kd or config.lmbda == 1):
        return PROMPTS
    return ALGORITHMS[config.rlhf_type].form


def prepare(config: RlhfConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Make the tokenizer and the output folder, bring the rows that `read` gave into TRL's form.

    Raises:
        ConfigError, DataError: everything a user can put right, found before any process is started.
    """
    batch = check(config, world_size)
    check_rewarded(config, batch, rows)
    if config.use_vllm:
        check_server(config)
    auto = CLASSIFIER if config.rlhf_type == "rm" else "AutoModelForCausalLM"
    prepared = run.prepare(config, batch, rows, val_rows, partial(encode, config), RlhfPrepared, auto)
    return _on_disk(prepared) if config.precompute_ref else prepared


def _on_disk(prepared: Prepared) -> Prepared:
    """What TRL computes once it writes beside the rows, and there every rank must find it."""
    import datasets

    with RunFolder(prepared.folder).discarded_if_it_fails():
        for name, rows in (("rows", prepared.rows), ("val_rows", prepared.val_rows)):
            if rows is not None:
                place = str(RunFolder(prepared.folder).rows / name)
                rows.save_to_disk(place)
                stored = datasets.load_from_disk(place)
                stored.report = rows.report
                setattr(prepared, name, stored)
    return prepared


# --- rows in TRL's form ------------------------------------------------------------------------------


@dataclass
class PairReport:
    """What became of the rows."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    longest: int = 0
    cut: int = 0

    def __str__(self) -> str:
        text = f"{self.kept:,} rows of up to {self.longest:,} tokens"
        return text + (f"; {self.rows - self.kept:,} left out as too long" if self.rows > self.kept else "")


def encode(config: RlhfConfig, rows: Any, processing: Any) -> Any:
    """A dataset in TRL's words, without the rows that are too long. Its attribute `report` says what was left out."""
    import datasets
    import pyarrow

    if have_files(rows):
        if config.rlhf_type not in PICTURED:
            raise DataError(
                f"{rows[0].source}: its rows name files, which --rlhf-type {config.rlhf_type} does not take;"
                f" {', '.join(PICTURED)} do."
            )
        if config.precompute_ref:
            raise ConfigError("--precompute-ref: the reference is asked once for rows of text only, not for pictures.")
        if config.group_by_length:
            raise ConfigError("--group-by-length: how many tokens a row with pictures has is known only in training.")
        prompts = config.rlhf_type in REWARDED
        return encode_pictured(config, rows, processing, partial(example_of, config), prompts, PairReport())
    report, kept, places, bad = PairReport(), [], [], []
    for row, example, length in _examples(config, rows, tokenizer_of(processing)):
        if isinstance(length, str):
            bad.append(BadRow(row.source, row.line, length))
            continue
        report.rows += 1
        report.longest = max(report.longest, length)
        if length > config.max_length:
            if config.truncation == "raise":
                raise DataError(f"{row.where}: the row has {length} tokens, --max-length is {config.max_length}.")
            if config.truncation == "drop" or config.rlhf_type in REWARDED:
                continue
            report.cut += 1
        kept.append(example)
        places.append(row.where)
    pass_over(rows, bad, report.rows, config.bad_rows)
    report.kept = len(kept)
    if not kept:
        raise DataError(
            f"Every row is longer than --max-length {config.max_length} (the longest: {report.longest} tokens).\n"
            "Raise --max-length."
        )
    if mixed := _mixed_column(kept, places):
        raise DataError(mixed)
    try:
        # In a table without JSON each object would get the keys of all others: calls of tools, for example.
        dataset = datasets.Dataset.from_list(kept, on_mixed_types="use_json")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise DataError(f"The rows cannot be put together: {first_line(error)}") from error
    dataset.report = report
    return dataset


def _mixed_column(examples: Sequence[dict[str, Any]], places: Sequence[str]) -> str:
    """Which column holds values of two kinds, and where, or nothing."""
    kinds: dict[str, tuple[str, str]] = {}
    for example, place in zip(examples, places, strict=True):
        for column, value in example.items():
            if value is None:
                continue
            kind = "a number" if isinstance(value, (int, float)) else kind_of(value)
            first, at = kinds.setdefault(column, (kind, place))
            if kind != first:
                return (
                    f"The column {column!r} holds {first} in {at} and {kind} in {place}.\n"
                    "Give it one kind of value in all rows: rewards get the whole column."
                )
    return ""


def _examples(config: RlhfConfig, rows: Any, tokenizer: Any) -> Iterator[tuple[Any, dict[str, Any], int | str]]:
    """Each row, what TRL wants of it, and how many tokens it has at most, or why it cannot be used."""
    from shardproof.data.encode import refusals, refuse_unseen_tools
    from shardproof.data.template import Template

    template, prompts = None, ALGORITHMS[config.rlhf_type].form is PROMPTS
    first: Any = next(iter(rows), None)
    for row in rows:
        if row.kind != first.kind:
            texts, chats = (row, first) if row.kind == "text" else (first, row)
            raise DataError(
                f"{texts.where} is plain text and {chats.where} is a conversation, and a run takes one of the two.\n"
                "Write the text as a conversation ('messages', or 'query' and 'response'), or train on one of the two."
            )
        if row.kind == "chat" and template is None:
            template = Template(tokenizer)
        example, conversations = example_of(config, row)
        lengths = []
        try:
            for conversation in conversations:
                text = "".join(turn["content"] for turn in conversation)
                if template and row.kind == "chat":
                    with refusals():
                        refuse_unseen_tools(template, row, conversation)
                        text = template.render(conversation, prompt=prompts)
                lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
            yield row, example, max(lengths)
        except Problem as problem:
            yield row, example, str(problem)


def example_of(config: RlhfConfig, row: Any) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """What TRL wants of a row, and the conversations in it."""
    form, chat = form_of(config), row.kind == "chat"
    turns = [_bare(turn) for turn in row.messages]
    split = row.extra.get("split", len(turns))
    if chat and config.system and turns[0]["role"] not in ("system", "developer"):
        turns, split = [{"role": "system", "content": config.system}, *turns], split + 1

    def said(part: list[dict[str, Any]]) -> Any:
        return part if chat else part[0]["content"]

    conversations = [turns]
    if form is PAIRS:
        worse = [_bare(turn) for turn in row.extra["rejected"]]
        example = {"prompt": said(turns[:split]), "chosen": said(turns[split:]), "rejected": said(worse)}
        conversations.append(turns[:split] + worse)
    elif form is JUDGED:
        example = {"prompt": said(turns[:split]), "completion": said(turns[split:]), "label": row.extra["label"]}
    elif config.rlhf_type == "gkd" and form is PROMPTS and chat:
        example = {"messages": [*turns, {"role": "assistant", "content": ""}]}
    elif config.rlhf_type != "gkd" and form is PROMPTS:
        columns = {name: value for name, value in row.extra["columns"].items() if name not in TAKEN}
        example = {**columns, "prompt": said(turns)}
    elif not chat:
        raise DataError(f"{row.where}: --rlhf-type gkd takes conversations, such as 'messages' or 'query'.")
    else:
        example = {"messages": turns}
    if row.extra.get("tools") and form is not PROMPTS:
        example["tools"] = row.extra["tools"]
    return example, conversations


def _bare(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as TRL's templates want it."""
    return {name: value for name, value in turn.items() if name != "loss"}


# --- training ----------------------------------------------------------------------------------------


def import_libraries(config: RlhfConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.rlhf_trainers  # noqa: F401

    ALGORITHMS[config.rlhf_type].classes()


def train(prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the step it comes in, and the weights of that step are saved.

    Returns: the signal that ended training, or 0.
    """
    from shardproof.train.optimizers import own_optimizer
    from shardproof.train.rlhf_trainers import trainer_class

    config: RlhfConfig = prepared.config
    kind = config.rlhf_type
    trl_trainer, trl_arguments = ALGORITHMS[kind].classes()
    scored, pictured = kind == "rm", are_pictured(prepared.rows)
    if pictured:
        check_trainer(trl_trainer, processing_for(prepared.rows, prepared.processing, kind in REWARDED))
    head: dict[str, Any] = {"num_labels": 1, "pad_token_id": prepared.tokenizer.pad_token_id} if scored else {}
    auto = CLASSIFIER if scored else "AutoModelForCausalLM"
    # TRL keeps what it asks once under a name that it makes of the weights themselves.
    model = load_model(prepared.model, config, auto, config.model_type, to_shard=not config.precompute_ref, **head)
    if pictured:
        check_model(model)
    chosen = choose_parts(model, config)
    task = "SEQ_CLS" if scored else "CAUSAL_LM"

    def make_trainer(callbacks: list[Any], reporter: Any) -> Any:
        try:
            return trainer_class(trl_trainer)(
                model=model,
                args=trl_arguments(**run.arguments(prepared), **own_arguments(config, prepared.batch), bf16=False),
                train_dataset=prepared.rows,
                eval_dataset=prepared.val_rows,
                processing_class=processing_for(prepared.rows, prepared.processing, kind in REWARDED),
                callbacks=callbacks,
                optimizer_of=load(config.external_plugins).find("optimizer", config.optimizer) or own_optimizer(config),
                peft_config=lora(config, task, model, chosen) if config.tuner == "lora" else None,
                batch=prepared.batch,
                order_seed=config.seed,
                order_files=prepared.order,
                **run.switches(config),
                frozen_stage=config.frozen_stage,
                frozen_precision=_precision(config.frozen_precision),
                reporter=reporter if config.log_completions else None,
                **_other_models(prepared),
            )
        except ValueError as error:  # TRL and PEFT check what they are given
            raise ConfigError(f"--rlhf-type {kind}: {first_line(error)}") from error

    return run.train(prepared, model, make_trainer, view, write, signals)


def _precision(name: str | None) -> Any:
    """Of a model beside the one that is trained; None leaves it to --precision, which fp32 does not."""
    if name == "fp32":
        import torch

        return shardproof.MixedPrecision(compute=torch.float32)
    return run.mixed_precision(name) if name else None


def _load_other(
    name: str, source: str, config: RlhfConfig, kind: str = "AutoModelForCausalLM", to_shard: bool = True, **more: Any
) -> Any:
    """The model of this option, which knows how it is to be sharded."""
    from shardproof.integrations.prepared import shard_as

    model = load_model(source, config, kind, to_shard=to_shard, **more)
    return shard_as(model, config.model_stages.get(name), _precision(config.model_precisions.get(name)))


def _other_models(prepared: Prepared) -> dict[str, Any]:
    """The models and functions that take part besides the one that is trained."""
    config: RlhfConfig = prepared.config
    kind = config.rlhf_type
    more: dict[str, Any] = {}
    head: dict[str, Any] = {"num_labels": 1}
    if kind in REWARDED:
        functions = load_rewards(
            config.reward_funcs,
            config.format_pattern,
            config.max_completion_length,
            load(config.external_plugins),
            alone=not config.reward_model,
        )
        judges = [_load_other("reward_model", m, config, CLASSIFIER, **head) for m in config.reward_model]
        more["reward_funcs"] = [*functions, *judges]
        if config.tuner == "full":
            more["make_reference"] = partial(
                _load_other, "ref_model", prepared.model, config, model_type=config.model_type
            )
    if config.ref_model or (kind in ("dpo", "kto") and config.tuner == "full" and not config.precompute_ref):
        source = config.ref_model or prepared.model
        more["ref_model"] = _load_other("ref_model", source, config, to_shard=not config.precompute_ref)
    if kind == "gkd" and config.teacher_model:
        more["teacher_model"] = _load_other("teacher_model", config.teacher_model, config)
    if kind == "ppo":
        head["pad_token_id"] = prepared.tokenizer.pad_token_id
        source = config.value_model or prepared.model
        more["value_model"] = _load_other("value_model", source, config, "AutoModelForTokenClassification", **head)
    return more
