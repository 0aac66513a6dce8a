"""The model of a run: checked before any library is imported, then loaded, with or without adapters."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
import traceback
from pathlib import Path
from typing import Any

from shardproof.checkpoint.manifest import MANIFEST
from shardproof.data.encoding.template import stops
from shardproof.errors import ConfigError, did_you_mean, exported
from shardproof.models.families.family import CAUSAL
from shardproof.models.loading.classes import (
    check_looks_back,
    check_own_code,
    check_timm,
    check_writes_on,
    load_body,
    load_pretrained,
    with_values,
)
from shardproof.models.loading.whole_files import check_whole_files
from shardproof.models.scorers import HEADED, SCORER, VALUER, load_scorer
from shardproof.plugins import OPTION, Plugins, load
from shardproof.train.folder import ADAPTER, CONFIG, MODEL, base_of
from shardproof.train.model.attention import choose_attention, share_rows
from shardproof.train.model.changes import add_tokens, grow, stretching
from shardproof.train.model.made_anew import note_made_anew, note_not_read
from shardproof.train.model.new_blocks import add_blocks
from shardproof.train.model.parts import freeze_head
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import REPORTS
from shardproof.train.options.tuners import KINDS, LORA, reads_weights

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TINY = "tiny"

# PEFT methods that work beside a model and are not part of its weights.
BESIDE = "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE ADAPTION_PROMPT".split()
NEVER_MERGED = "beside the model, and cannot be merged into its weights. `infer` and PEFT load them as they are"


def check_model_source(model: str, option: str = "--model") -> None:
    """Raise ConfigError for a folder that cannot be a model, before any library is imported."""
    path, or_tiny = Path(model).expanduser(), ", or 'tiny'" if option == "--model" else ""
    if model == TINY and or_tiny:
        return
    if model == TINY and not path.is_dir():
        raise ConfigError(
            f"{option} {TINY}: this small model is built from the rows of a run, and only for its --model.\nName a"
            f" folder or a hub id; a run of --model {TINY} leaves such a folder, OUTPUT_DIR/{MODEL}."
        )
    if not model.strip():
        raise ConfigError(f"{option} is empty.\nName a folder, a hub id (name or org/name){or_tiny}.")
    if path.is_file():
        raise ConfigError(f"{option} {model} is a file.\nName the folder that holds config.json and the weights.")
    if path.is_dir():
        if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
            raise ConfigError(f"{option} {model} holds adapters only. {_of_adapters(path, model, option)}")
        if not (path / "config.json").is_file():
            raise ConfigError(f"The model folder {model} has no config.json.{of_a_run(path, option)}")
        if lacks_weights(path):
            raise ConfigError(
                f"The model folder {model} has no weights: there is no *.safetensors and no pytorch_model*.bin in it."
            )
        check_whole_files(path)
    elif not _may_be_hub_id(model):
        raise ConfigError(
            f"There is no model folder {model}{_neighbour(path)}.\nName a folder, a hub id (name or org/name){or_tiny}."
        )


def check_base(run: str | Path, base: str, said_in: Path) -> None:
    """Raise ConfigError if the folder of the model that a run or its adapters were trained from no longer exists."""
    if not Path(base).expanduser().exists() and not _may_be_hub_id(base):
        raise ConfigError(
            f"{run} needs {base}, the model that it was trained from, but it is gone.\nPut it back there, or write"
            f" its new place into {said_in}."
        )


def of_a_checkpoint(path: str | Path, option: str) -> str:
    """What to do with a checkpoint where a model is expected, for `option` or other wording."""
    return f"\nIt is a checkpoint. Make a model of it first: {exported(path, option)}."


def of_a_run(path: Path, option: str) -> str:
    """What to name instead of a run or a checkpoint; empty for other folders."""
    if (path / MANIFEST).is_file():
        return of_a_checkpoint(path, option)
    model = path / MODEL
    if (model / ADAPTER).is_file():
        return f"\nIt is a run of adapters. {_of_adapters(model, path, option)}"
    return f"\nIt is a run. Its model is {option} {model}." if (model / "config.json").is_file() else ""


def said_of(folder: Path) -> dict[str, Any]:
    """The PEFT configuration of the adapters in a folder.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return dict(json.loads((folder / ADAPTER).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ADAPTER} cannot be read: {first_line(error)}") from error


def _of_adapters(folder: Path, named: str | Path, option: str) -> str:
    """What to do with a folder of adapters where a model is expected."""
    said = said_of(folder)
    if (kind := said.get("peft_type")) in BESIDE:
        return f"They are PEFT's {kind}, {NEVER_MERGED}. Their model: {said.get('base_model_name_or_path')}."
    goes_on = str(kind).lower()
    go_on = goes_on in (LORA, *KINDS) and option == "--model"
    first = f"Merge them into their model first: {exported(named, option)}."
    return f"{first} Or continue training them: --adapters {named}." if go_on else first


def lacks_weights(folder: Path) -> bool:
    return not any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _may_be_hub_id(model: str) -> bool:
    """`name` or `org/name`, unless a folder `org` lies here: then a path was meant."""
    organisation = model.rpartition("/")[0]
    a_path = bool(organisation) and Path(organisation).is_dir()
    return not a_path and re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", model) is not None


def _neighbour(path: Path) -> str:
    """A hint at the folder that may have been meant, or at a missing parent folder."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()], n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def is_local(model: str) -> bool:
    return model == TINY or Path(model).expanduser().is_dir()


def check_packages(config: RunConfig) -> None:
    """Raise ConfigError for an option whose package is not installed."""
    for name in config.report_to:
        if name not in REPORTS:
            raise ConfigError(f"--report-to {name}: use one of {', '.join(REPORTS)}.{did_you_mean(name, REPORTS)}")
        if name != "none" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report-to {name} needs the package {name}: pip install {name}")


def check_attention(config: RunConfig) -> None:
    """Raise ConfigError for an attention implementation that cannot train on this machine."""
    import torch

    if config.attn == "flex_attention" and config.launcher != "ray" and not torch.accelerator.is_available():
        raise ConfigError(
            "--attn flex_attention: torch has no backward pass for it on a CPU, and there is no GPU. Use sdpa or eager."
        )
    if config.attn == "flash_attention_2" and not any(map(importlib.util.find_spec, ("flash_attn", "kernels"))):
        raise ConfigError(
            "--attn flash_attention_2 needs the package flash-attn (or kernels). --attn varlen does the same with"
            " torch alone."
        )


def load_tokenizer(source: str, config: RunConfig) -> Any:
    """The tokenizer, with a padding token.

    Raises:
        ConfigError: there is no tokenizer, or no padding token.
    """
    from shardproof.models.loading.processors import load_fast_tokenizer, note_batches

    try:
        tokenizer = load_fast_tokenizer(source, config.trust_remote_code)
    except Exception as error:  # the Rust library may raise anything
        raise ConfigError(f"The tokenizer of {source} cannot be loaded: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up for a folder that has none
        raise ConfigError(
            f"The tokenizer of {source} has no tokens: its files (tokenizer.json and others) are missing. Copy them"
            " there from the model that it was trained from."
        )
    note_batches(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"The tokenizer of {source} has neither a padding token nor an end-of-text token. Set its pad_token."
        )
    return tokenizer


def load_processing(source: str, config: RunConfig) -> Any:
    """The model's processor if it takes images, audio or video, otherwise its tokenizer; taken from the run whose
    adapters are trained further, if it is one of ours.

    Raises:
        ConfigError: it cannot be loaded, or the model needs code of its own that may not be run.
    """
    from shardproof.models.loading.processors import load_processor

    if config.adapters and (Path(config.adapters).parent / CONFIG).is_file():
        source = config.adapters
    if not config.external_plugins:  # a plugin's model may replace that code
        check_own_code(source, config.trust_remote_code)
        check_writes_on(source, getattr(config, "task", "causal_lm"))
        check_timm(source, config.trust_remote_code)
        if (change := stretching(config)) is not None:  # refused here, before rows are encoded
            from transformers import AutoConfig

            change(AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code))
    model = base_of(Path(source)) if (Path(source) / ADAPTER).is_file() else None
    found = load_processor(source, config.trust_remote_code, model) or load_tokenizer(source, config)
    add_tokens(tokenizer_of(found), getattr(config, "new_special_tokens", []))
    return found


def tokenizer_of(processing: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is returned as it is."""
    return getattr(processing, "tokenizer", processing)


def load_model(
    source: str,
    config: RunConfig,
    kind: str = CAUSAL,
    model_type: str | None = None,
    to_shard: bool = False,
    **more: Any,
) -> Any:
    """The model without adapters, in fp32 for the master weights, or in bf16 if there are no separate ones. Its
    checkpointing, once enabled, follows --gradient-checkpointing.

    Args:
        model_type: the model from --external-plugins that loads it; None decides by its config.
        to_shard: weights are read when the model is sharded: each rank reads only what it keeps.
        more: for `from_pretrained`; with `output_loading_info`, the loading info is returned along with the model.

    Raises:
        ConfigError: the weights cannot be loaded.
    """
    from shardproof.integrations.four_bits import adopt
    from shardproof.train.model.activations import choose_checkpointing

    loaded = _loaded(source, config, kind, model_type, to_shard, **more)
    note_not_read(model := loaded[0] if isinstance(loaded, tuple) else loaded)
    if getattr(config, "new_special_tokens", None):
        tokenizer = load_tokenizer(source, config)
        add_tokens(tokenizer, config.new_special_tokens)  # type: ignore[attr-defined]
        grow(model, tokenizer)
    add_blocks(model, getattr(config, "new_blocks", 0))
    choose_attention(model, config)
    share_rows(model, config)
    if kind != CAUSAL:
        freeze_head(model)
    adopt(model, loaded_in(config))
    choose_checkpointing(model, config.gradient_checkpointing)
    return loaded


def also_stops(model: Any, tokenizer: Any) -> None:
    """Make a model that learns a chat template stop at the end of its answers, here and wherever it is loaded."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and (found := stops(tokenizer, generation.eos_token_id)):
        generation.eos_token_id = found if len(found) > 1 else found[0]


def loaded_in(config: Any) -> Any:
    """The dtype in which a run or a plan loads weights, which is that of the master weights."""
    import torch

    return torch.bfloat16 if config.stochastic_rounding else torch.float32


def _loaded(source: str, config: RunConfig, kind: str, model_type: str | None, to_shard: bool, **more: Any) -> Any:
    import transformers

    from shardproof.integrations.pretrained import without_values
    from shardproof.models.attention.varlen import attention_options, unknown_attention

    transformers.set_seed(config.seed)
    options = {"dtype": loaded_in(config), **attention_options(config.attn)}
    registered = registered_model(source, load(config.external_plugins), model_type)
    change = stretching(config)
    if registered is not None and kind == CAUSAL:
        if change is not None:
            raise ConfigError("--rope-scaling and --max-model-len: a plugin model makes its config itself.")
        return from_registered(registered, source, **options)
    options |= {"trust_remote_code": config.trust_remote_code}
    how = without_values if to_shard and not reads_weights(config.tuner) else with_values
    speaks: dict[str, Any] = {"enable_audio_output": config.enable_audio_output}
    try:
        if kind == CAUSAL:
            check_looks_back(source, config.trust_remote_code)
            return load_pretrained(source, how=how, change=change, **speaks, **options, **more)
        if kind == "AutoModel":
            return load_body(source, how=how, **speaks, **options, **more)
        if kind in (SCORER, VALUER):
            return load_scorer(source, kind, how=how, **speaks, **options, **more)
        return how(getattr(transformers, kind), source, **options, **more)
    except ConfigError:
        raise
    except Exception as error:  # loaders of formats and model code may raise anything
        why = unknown_attention(error) or first_line(error)
        raise ConfigError(f"The model {source} cannot be loaded: {why}") from error


def registered_model(source: str, plugins: Plugins, model_type: str | None = None) -> Any:
    """The model of a plugin that loads `source`: the one with this name or named by config.json; None if there is none.

    Raises:
        ConfigError: no plugin has registered that name, or the model that config.json names.
    """
    if model_type is not None:
        return plugins.find("model", model_type)
    file = Path(source).expanduser() / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    classes = config.get("architectures") or []
    for name in plugins.names("model"):
        found = plugins.find("model", name)
        if config.get("model_type") == name or found.__name__ in classes:
            return found
    import transformers

    known = any(hasattr(transformers, name) or name.endswith(HEADED) for name in classes)  # some HEADED ones are ours
    if classes and not config.get("auto_map") and not known:
        raise ConfigError(
            f"The model {source} is a {classes[0]}, which transformers does not know.\n"
            f"Name the file that registers it with {OPTION}."
        )
    return None


def causal_lm(source: str, plugins: Plugins | None = None, model_type: str | None = None, **options: Any) -> Any:
    """A language model, loaded by a plugin's model if there is one for it; raises what the loader raises.

    `options` are those of `load_pretrained`; `how` does not reach a plugin's model, which is always loaded in full.
    """
    registered = registered_model(source, plugins or Plugins(), model_type)
    if registered is None:
        check_looks_back(source, bool(options.get("trust_remote_code")))
        return load_pretrained(source, **options)
    return from_registered(
        registered, source, **{k: v for k, v in options.items() if k not in ("how", "trust_remote_code")}
    )


def from_registered(registered: Any, source: str, **options: Any) -> Any:
    """The model that a plugin's class or function loads from a folder.

    Raises:
        ConfigError: loading fails, the result is not a transformers model, or its loss ignores the step's number of
            tokens.
    """
    from transformers import PreTrainedModel

    name, missing = registered.__name__, []
    try:
        if hasattr(registered, "from_pretrained"):
            model, found = registered.from_pretrained(source, output_loading_info=True, **options)
            missing = note_made_anew(model, found["missing_keys"])
        else:
            model = registered(source, **options)
    except Exception as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{place.filename}, line {place.lineno}"
        raise ConfigError(f"The model {source} cannot be loaded by {name}: {first_line(error)} ({at})") from error
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{name} made a {type(model).__name__} from {source}, but a transformers model is expected.")
    for weight in missing:
        if not model.get_parameter_or_buffer(weight).isfinite().all():
            raise ConfigError(
                f"{weight} of {name} is not in {source} and has no values: transformers initialises new weights with"
                f" its _init_weights(module), which must set this one."
            )
    forward = inspect.signature(type(model).forward).parameters
    takes = "num_items_in_batch" in forward or any(p.kind is p.VAR_KEYWORD for p in forward.values())
    if "labels" in forward and not takes:
        raise ConfigError(
            f"The forward of {type(model).__name__} takes labels, but not num_items_in_batch, the number of tokens"
            f" learned in the step, by which it must divide its summed loss.\nAccept both, or neither with --loss."
        )
    return model


def first_line(error: BaseException) -> str:
    """The first sentence of a library's error, for a short message; with the next line if it ends in a colon."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    if first.rstrip().endswith(":") and others:
        first = f"{first.rstrip()} {others[0].strip()}"
    return first[:300]
