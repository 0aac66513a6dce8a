"""The subject of a plan: the model of the options on the meta device, with the class that training would load."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.doctor.planning.checkpointing import Checkpointing, checkpointing_of
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy
from shardproof.models.families.family import CAUSAL
from shardproof.models.forward import without_adapters
from shardproof.models.scorers import SCORER, VALUER
from shardproof.plugins import check_files
from shardproof.train.checks.contradictions import check_bits, check_together
from shardproof.train.options.config import SELECTIVE, SftConfig
from shardproof.train.options.option import flag
from shardproof.train.options.patterns import check_patterns
from shardproof.train.options.tuners import KINDS

if TYPE_CHECKING:
    from torch import nn

    from shardproof.doctor.config import PlanConfig
    from shardproof.doctor.planning.sample import Sample

ROWS_ARE_TEXT = "rows are text (plan --files describes others)"
OF_FILES = "dtype_of_files"  # the dtype in the config of a model without weights
# Options of a run for which a plan takes several values.
SEVERAL = {"stage", "offload", "gradient_checkpointing", "per_device_batch_size", "max_length"}
OF_MODEL = (
    *(
        "tuner",
        "tuner_arguments",
        "new_blocks",
        "lora_rank",
        "lora_dropout",
        "dora",
        "target_modules",
        "modules_to_save",
        "freeze",
        "train_parts",
    ),
    *("target_parameters", "freeze_parameters", "trainable_parameters", "quantize"),
)


def meta_model(config: PlanConfig, auto: str = CAUSAL) -> nn.Module:
    """The model, with untrained parameters frozen, and with adapters if asked for.

    Args:
        auto: the transformers class that would load it. A classifier has one label if the number is not given.

    Raises:
        ConfigError: there is no such config, or a trainable model cannot be built from it.
    """
    import torch

    from shardproof.doctor.planning.stand_ins import Unfilled
    from shardproof.integrations.four_bits import packed_kind
    from shardproof.models.attention.varlen import unknown_attention
    from shardproof.train.adapters.adding import with_adapters
    from shardproof.train.model.attention import choose_attention
    from shardproof.train.model.loading import first_line, loaded_in
    from shardproof.train.model.new_blocks import add_blocks
    from shardproof.train.model.parts import freeze_head, in_bits

    source = source_of(config)
    check_of_transformers(source, config)
    check_trained(source, config)
    tasks = {SCORER: "SEQ_CLS", "AutoModel": "FEATURE_EXTRACTION"}
    task = tasks.get(auto, "CAUSAL_LM")
    recipe = SftConfig(**{name: getattr(config, name) for name in OF_MODEL})
    if config.tuner in KINDS and KINDS[config.tuner].plans is None:
        raise ConfigError(
            f"--tuner {config.tuner}: PEFT needs values to create or compute these adapters, and a plan has none. "
            "'shardproof doctor' runs two real steps."
        )
    try:
        with torch.device("meta"), Unfilled():
            model: Any = _built(source, config, auto, loaded_in(config))
            add_blocks(model, config.new_blocks)
            choose_attention(model, config)
            recipe.quantize = recipe.quantize or (packed_kind(model.config) if config.tuner != "full" else None)
            check_bits(recipe)
            if auto != CAUSAL:
                freeze_head(model)
            model = in_bits(model, recipe)
            with torch.device(KINDS[recipe.tuner].plans or "meta" if recipe.tuner in KINDS else "meta"):
                model = with_adapters(model, recipe, task).to("meta")
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers, or the model's own code, raises
        if config.debug:
            raise
        why = unknown_attention(error) or first_line(error)
        if why.startswith("Unrecognized configuration class"):
            kind = why.partition("<class '")[2].partition("'")[0].rpartition(".")[2].removesuffix("Config")
            why = f"a {kind} does not generate text token by token, as the models for sft and rlhf do"
        raise ConfigError(
            f"--model {config.model}: a trainable model cannot be built from its config: {why}."
        ) from error
    as_held(model, config, unsaved=config.tuner != "full")
    model.train()
    return model


def check_of_transformers(source: str, config: PlanConfig) -> None:
    """Raise ConfigError for a plugin's model, whose class may do anything on creation."""
    from transformers import CONFIG_MAPPING

    from shardproof.models.loading.processors import said_by
    from shardproof.plugins import load
    from shardproof.train.model.loading import registered_model

    path = Path(source).expanduser()
    found = said_by(source, "config.json") if path.exists() else {}
    kind = found.get("model_type")
    plugins = load(config.external_plugins)
    loaded = plugins.names("model") and path.is_dir() and registered_model(source, plugins) is not None
    if loaded or (kind and kind not in CONFIG_MAPPING and not found.get("auto_map")):
        raise ConfigError(
            f"--model {config.model} is a {kind}: plan supports transformers models, but not plugin models. "
            "'shardproof doctor' runs two steps of it."
        )


def check_trained(source: str, config: PlanConfig) -> None:
    """Raise sft's ConfigError for a model that no command trains. For an encoder there is only a note."""
    from shardproof.data.forms.parts import Problem
    from shardproof.data.media.encode import MediaEncoder
    from shardproof.data.media.limits import Limits
    from shardproof.data.rows import Row
    from shardproof.models.loading.classes import check_timm, check_writes_on
    from shardproof.models.loading.processors import processor_if_there
    from shardproof.train.model.loading import TINY

    if source == TINY:
        return
    check_writes_on(source, config.task)
    check_timm(source, config.trust_remote_code)
    processor = processor_if_there(source, config.trust_remote_code)
    if processor is not None:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        with suppress(Problem):
            MediaEncoder(processor, Limits()).encode(Row(turns, "--model", 1, kind="text"))


def as_held(model: nn.Module, config: PlanConfig, unsaved: bool = True) -> nn.Module:
    """The model with its frozen weights in the dtype in which our commands' trainers keep them."""
    from shardproof.integrations.prepared import hold_as_computed
    from shardproof.train.settings import mixed_precision

    precision = None if config.stochastic_rounding else mixed_precision(config.precision, config.reduce_dtype)
    base: Any = model
    if unsaved or (precision is not None and base.__dict__.get(OF_FILES) == precision.compute):
        hold_as_computed(model, precision)
    return model


def source_of(config: PlanConfig) -> str:
    """The folder or hub id, or a lone config.json.

    Raises:
        ConfigError: nothing with that name exists, or it cannot be read.
    """
    from shardproof.models.loading.classes import check_own_code
    from shardproof.train.model.loading import TINY, check_model_source, of_a_run

    if config.model == TINY:
        return TINY
    path = Path(config.model).expanduser()
    if not config.model.strip() or not path.exists():
        check_model_source(config.model)
        return config.model
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = "has no config.json" if path.is_dir() and not file.is_file() else f"cannot be read: {error}"
        instead = of_a_run(path, "--model") or "\nName a model folder, its config.json, or a hub id."
        raise ConfigError(f"--model {config.model} {what}.{instead}") from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise ConfigError(
            f"--model {config.model}: {file.name} names no model_type, so it is not a model config.\n"
            "Name a model folder, its config.json, or a hub id."
        )
    source = str(file.parent if file.name == "config.json" else file)  # the model's own code is next to it
    if found.get("auto_map") and Path(source).is_dir():
        check_own_code(source, config.trust_remote_code)
    return source


def _built(source: str, config: PlanConfig, auto: str, dtype: Any) -> Any:
    """Build through `load_pretrained`, which knows the classes of families, with a config instead of weights."""
    import transformers

    from shardproof.models.attention.varlen import attention_options
    from shardproof.models.loading.classes import load_body, load_pretrained
    from shardproof.models.loading.processors import processor_class
    from shardproof.models.scorers import load_scorer
    from shardproof.models.tiny import tiny_config
    from shardproof.train.embedding.recipe import BODY
    from shardproof.train.model.loading import TINY

    def without_weights(kind: Any, _: str, *, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        packed = config.__dict__.pop("quantization_config", None)
        of_files = getattr(config, "dtype", None)
        if hasattr(kind, "from_config"):
            model = kind.from_config(config, trust_remote_code=trust_remote_code, **options)
        else:  # a class has no such option
            model = kind._from_config(config, **options)
        model.__dict__[OF_FILES] = of_files
        if packed is not None:
            model.config.quantization_config = packed
        return model

    options: dict[str, Any] = {"dtype": dtype, **attention_options(config.attn)}
    head: dict[str, Any] = {"num_labels": config.num_labels or 1, "pad_token_id": 0}
    loaders: dict[str, Any] = {CAUSAL: load_pretrained, BODY: load_body}
    loaders |= {kind: partial(load_scorer, kind=kind, **head) for kind in (SCORER, VALUER)}
    alone = Path(source).is_file()  # a config without the files that describe a processor
    if source == TINY or (auto != CAUSAL and alone) or (auto == BODY and processor_class(source) is None):
        shape = tiny_config() if source == TINY else transformers.AutoConfig.from_pretrained(source)
        if auto != CAUSAL:
            shape.update(head)
        return getattr(transformers, auto).from_config(shape, **options)
    return loaders[auto](
        source,
        how=without_weights,
        enable_audio_output=config.enable_audio_output,
        trust_remote_code=config.trust_remote_code,
        **options,
    )


def recipe_for(config: PlanConfig) -> SftConfig:
    """The planned run as options of sft; for options with several values, their common part."""
    shared = SftConfig.model_fields.keys() & type(config).model_fields.keys() - SEVERAL
    kinds = [again for again in config.gradient_checkpointing if again not in ("no", "both", 0)]
    kind: Any = SELECTIVE if SELECTIVE in kinds else bool(kinds) or config.checkpointing_reentrant
    return SftConfig(**{name: getattr(config, name) for name in shared}, gradient_checkpointing=kind)


def check(config: PlanConfig) -> None:
    """Raise ConfigError for options that cannot be combined, as sft does."""
    for name in ("gpus", "per_device_batch_size", "max_length"):
        if min(getattr(config, name), default=0) < 1:
            raise ConfigError(f"{flag(name)} {getattr(config, name)}: must be 1 or more.")
    if config.device == "cpu" and {"optimizer", "all"} & {*config.offload}:
        raise ConfigError(
            "--offload optimizer and all are for accelerators: with --device cpu everything is in host memory anyway."
        )
    if config.shard_group == 1:
        raise ConfigError("--shard-group 1: each process would hold everything. Leave it out, and use --stage 0.")
    recipe = recipe_for(config)
    check_together(recipe)
    check_patterns(recipe)
    check_files(config.external_plugins)
    check_bits(recipe)


def check_model(model: Any, config: PlanConfig) -> None:
    """Raise ConfigError for options that this model does not support."""
    from shardproof.integrations.four_bits import packed_kind
    from shardproof.parallel.sequence import check_heads_of
    from shardproof.train.losses.shortcuts import no_plain_head
    from shardproof.train.model.attention import check_parts_of_rows
    from shardproof.train.model.parts import packed_already

    inner = without_adapters(model)
    if config.tuner == "full" and packed_kind(inner.config) is not None:
        raise packed_already(config.model)
    why = no_plain_head(inner) if config.chunked_loss else ""
    if why:
        raise ConfigError(f"--chunked-loss: {why}. Leave --chunked-loss out.")
    if config.sequence_parallel > 1:
        check_heads_of(inner.config, config.sequence_parallel)
        check_parts_of_rows(inner)


def kinds_of(model: Any, config: PlanConfig) -> list[Checkpointing]:
    """The kinds of checkpointing to consider.

    Raises:
        ConfigError: one is asked for by name, but the model supports none.
    """
    inner = without_adapters(model)
    kinds = checkpointing_of(config.gradient_checkpointing)
    if getattr(inner, "supports_gradient_checkpointing", True) or kinds == [False]:
        return kinds
    if config.gradient_checkpointing != ["both"]:
        raise ConfigError(
            f"--gradient-checkpointing: a {type(inner).__name__} cannot recompute its activations. Leave it out."
        )
    return [False]


def notes_on(model: Any, config: PlanConfig, sample: Sample | None = None) -> list[str]:
    """The assumptions of the numbers about this model, and about rows like `sample`."""
    from shardproof.integrations.four_bits import packed_kind
    from shardproof.models.attention.varlen import knows_ours
    from shardproof.models.loading.classes import sees_ahead

    inner = without_adapters(model)
    found, text = [], inner.config.get_text_config()
    sizes: dict[str, int] = {}
    part_of = anatomy(model).part_of
    for name, p in model.named_parameters():
        sizes[part_of[name]] = sizes.get(part_of[name], 0) + p.numel()
    if lacking := [part for part in config.freeze if part not in sizes]:
        found.append(f"it has no {', '.join(lacking)} to freeze")
    seen = sample.parts if sample else set()
    if sample:
        found.append(
            f"each row has {sample.what}: {sample.tokens} tokens with its template, plus text up to the full length"
        )
    towers = [part for part in sizes if part in {"vision", "audio", "talker"} - seen]
    if towers:
        there = ", ".join(f"{part} {sizes[part] / 1e6:,.0f} M" for part in towers)
        rows = "no row has files for them" if sample else ROWS_ARE_TEXT
        found.append(f"{rows}: for its other parts ({there} parameters) everything but activations is counted")
    if config.task == "causal_lm" and sees_ahead(inner.config):
        found.append("it is an encoder, which sft takes with --task embedding, seq_cls or reranker")
    if not getattr(inner, "supports_gradient_checkpointing", True):
        found.append(f"a {type(inner).__name__} has no gradient checkpointing")
    packed = getattr(inner.config, "quantization_config", None)
    if packed is not None and packed_kind(inner.config) is None:
        method = packed.get("quant_method", "") if isinstance(packed, dict) else getattr(packed, "quant_method", "")
        found.append(f"its weights are packed ({method or 'quantised'}): their unpacked size is counted")
    if config.attn is None and inner.config._attn_implementation == "eager" and knows_ours(inner):
        found.append("its own attention keeps scores of all pairs of a row's tokens; --attn varlen does not")
    if config.tuner == "randlora" and config.device == "cpu" and config.precision != "fp32":
        found.append("on a CPU PEFT's RandLoRA computes with copies in fp32, which are not counted")
    known = getattr(text, "max_position_embeddings", None)
    if known and max(config.max_length) > known:
        found.append(f"it has {known} positions, fewer than --max-length {max(config.max_length)}")
    return found
