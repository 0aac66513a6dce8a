"""Models of any family, loaded with transformers' own classes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.families.family import CAUSAL
from shardproof.models.families.known import family_of
from shardproof.models.loading.packed import unpacking
from shardproof.models.loading.processors import processor_class, said_by
from shardproof.models.loading.row_by_row import fed_with_data
from shardproof.models.media import speech, speech_groups
from shardproof.models.media.frames import frames_told_apart
from shardproof.models.media.pictures import pictures_taken

_SPEAKING = {
    kind: functools.partial(speech.speaking_forward, codes_loss=module.codes_loss)
    for kind, module in (("one", speech), ("groups", speech_groups))
}


def with_values(kind: Any, source: str, **options: Any) -> Any:
    """The result of this class's `from_pretrained`; a pair with `output_loading_info`, for every class."""
    from transformers import PreTrainedModel

    load = kind.from_pretrained
    if options.get("output_loading_info") and isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        # A class that loads more than weights (Qwen2.5-Omni its voices) does so in its own from_pretrained, which takes
        # the result of this call for the model.
        load = functools.partial(PreTrainedModel.from_pretrained.__func__, kind)
    with warnings.catch_warnings():  # some packings warn although the request is supported
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        return load(source, **{**unpacking(source), **options})


def load_pretrained(
    source: str,
    *,
    how: Callable[..., Any] = with_values,
    enable_audio_output: bool | None = None,
    trust_remote_code: bool = False,
    change: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """Load the model from a folder or the hub. Its forward takes labels and returns a loss. With `output_loading_info`
    among the options, the result is a pair, as in transformers.

    Args:
        how: called with the class, `source` and options; returns the model.
        enable_audio_output: whether a model that speaks has the modules for that. Without, they are neither built nor
            read. None leaves it to the model's config.
        change: a function that changes the model's config.
        options: for `from_pretrained`.

    Raises:
        ConfigError: audio output is requested from a model that does not speak.
        Exception: anything that transformers or the model's own code raises.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    family = family_of(config)
    if change is not None:
        change(config)
    if enable_audio_output is not None:
        check_speaks(source, config)
        config.enable_audio_output = enable_audio_output
    if family is None or family.own_code:
        kind = _auto_class(config)
        model = how(kind, source, config=config, trust_remote_code=trust_remote_code, **options)
        loaded = model[0] if isinstance(model, tuple) else model
        if family is not None and family.takes_data:
            fed_with_data(loaded)
        frames_told_apart(loaded)
        pictures_taken(loaded)
        _name_decoder(loaded)
        return model
    cls = getattr(transformers, family.model_class)
    if family.trains:
        cls = trained_by(cls, family.trains, _SPEAKING.get(family.codes))
    return how(cls, source, config=config, **options)


def _name_decoder(model: Any) -> None:
    """Make the language model of Llama 4 or Mllama, loaded alone (changed in place), return its decoder as
    `base_model`: transformers looks where the full model has it, finds nothing, and returns the model itself."""
    if model.base_model is model and model.config.get_text_config() is model.config:
        from transformers import PreTrainedModel

        inner = [name for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
        if len(inner) == 1:
            model.base_model_prefix = inner[0]


def check_speaks(source: str, config: Any) -> None:
    """Raise ConfigError if --enable-audio-output is given for a model without modules for it."""
    family = family_of(config)
    if family is None or not family.speech:
        raise ConfigError(f"--enable-audio-output: the model {source} ({config.model_type}) has no audio output.")


def load_body(
    source: str, *, how: Callable[..., Any] = with_values, enable_audio_output: bool | None = None, **options: Any
) -> Any:
    """Load the model from a folder or the hub, to compute the last hidden state of each token. For a text model this is
    transformers' `AutoModel`, without a head; a model that takes files is complete, as it is trained and saved
    elsewhere, and its forward is that of its backbone.

    Args:
        how, enable_audio_output, options: as for `load_pretrained`, which also says what is raised.

    Raises:
        ConfigError: the model takes files, but has no backbone that does.
    """
    import transformers

    if processor_class(source) is None:
        if enable_audio_output is not None:
            raise ConfigError(f"--enable-audio-output: {source} is a text model without audio output.")
        return how(transformers.AutoModel, source, **options)
    loaded = load_pretrained(
        source,
        how=lambda kind, *args, **more: how(_bodied(kind, **more), *args, **more),
        enable_audio_output=enable_audio_output,
        **options,
    )
    check_one_backbone(loaded[0] if isinstance(loaded, tuple) else loaded, "--task embedding")
    return loaded


def _bodied(kind: Any, config: Any, **options: Any) -> Any:
    """A class of the same name whose forward is that of its backbone, for models that take files."""
    cls = class_of(kind, config)

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        return self.base_model(*args, **inputs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def class_of(kind: Any, config: Any) -> Any:
    """The model class for this config: `kind` itself, or the class that this Auto class of transformers has for it."""
    import transformers

    return kind if issubclass(kind, transformers.PreTrainedModel) else kind._model_mapping[type(config)]


def check_one_backbone(model: Any, who: str) -> None:
    """Raise ConfigError for a model without a backbone that takes files and returns a hidden state for each token."""
    backbone, takes = model.base_model, {"pixel_values", "input_features"}
    if backbone is model or not takes & set(inspect.signature(backbone.forward).parameters):
        raise ConfigError(
            f"{who} needs a model whose towers and language model are one backbone, but {type(model).__name__} keeps"
            " them apart: only 'shardproof sft' can train it on images and audio."
        )


def check_own_code(source: str, allowed: bool) -> None:
    """Raise ConfigError for a model whose class transformers does not have, unless its own code may run."""
    from transformers import CONFIG_MAPPING

    config = {} if allowed else said_by(source, "config.json")
    named = config.get("auto_map") or {}
    if not named or config.get("model_type") in CONFIG_MAPPING:
        return
    files = sorted({str(name).rpartition("--")[2].partition(".")[0] + ".py" for name in named.values()})
    raise ConfigError(
        f"The model {source} ({config.get('model_type')}) is not a class of transformers: it comes with its own code"
        f" ({', '.join(files)}).\nRead that code, and allow it to run with --trust-remote-code."
    )


def check_writes_on(source: str, task: str = "causal_lm") -> None:
    """Raise ConfigError, in terms of the task, for a model whose answers do not continue the prompt (T5, Whisper)."""
    config = said_by(source, "config.json")
    named = config.get("architectures") or [""]
    if not config.get("is_encoder_decoder") or str(named[0]).endswith("ForCausalLM"):
        return
    kind = config.get("model_type")
    told = f"The model {source} ({kind}) is an encoder-decoder model, whose output is separate from its input."
    if task == "causal_lm":
        raise ConfigError(
            f"{told} sft and rlhf train models that continue their input, with or without images and audio.\nA script"
            " with transformers' Seq2SeqTrainer trains it at any stage, as sharded(Seq2SeqTrainer):"
            " from shardproof.integrations.transformers import sharded."
        )
    encoders = "" if task == "generative_reranker" else " or an encoder (such as BERT)"
    raise ConfigError(f"{told}\n--task {task} trains only one of the two: name a decoder (such as Qwen3){encoders}.")


def check_timm(source: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a model with a vision tower from timm (Gemma 3n), if that is not installed."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if importlib.util.find_spec("timm") is not None:
        return
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception:  # reported when it is loaded
        return
    towers = [getattr(getattr(config, name, None), "model_type", "") for name in config.sub_configs]
    if any(MODEL_MAPPING_NAMES.get(kind, "").startswith("Timm") for kind in towers):
        raise ConfigError(
            f"The model {source} ({config.model_type}) has a vision tower from the package timm, which is not"
            " installed.\nInstall it: pip install timm"
        )


def check_looks_back(source: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for an encoder (BERT): tokens see later ones, so each would be predicted from itself."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception:  # reported when it is loaded
        return
    if sees_ahead(config):
        raise ConfigError(
            f"The model {source} ({config.model_type}) is an encoder: each token sees later ones, so an answer"
            " would be predicted from itself, and none could be generated.\nTrain an encoder with 'shardproof sft' and"
            " --task embedding, --task seq_cls or --task reranker. A decoder of this model type has is_decoder: true in"
            " its config.json."
        )


def sees_ahead(config: Any) -> bool:
    """Whether this is the config of an encoder, whose attention is not causal."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    if config.model_type not in ENCODERS or CAUSAL in (getattr(config, "auto_map", None) or {}):
        return False
    return not any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder", "causal"))


def import_class(source: str) -> None:
    """Import the classes of a model folder, so that processes forked later need not."""
    import transformers

    file = Path(source).expanduser() / "config.json"
    family = family_of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
    if family is not None and not family.own_code:
        getattr(transformers, family.model_class)


def _auto_class(config: Any) -> Any:
    """AutoModelForCausalLM for language models, AutoModelForMultimodalLM for models that take more than text.

    For some configs (Qwen3.5, Llama 4) the first would load only the language model, without the towers: it is used
    only if the files are of that class.
    """
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    multimodal: Any = transformers.AutoModelForMultimodalLM
    if type(config) not in multimodal._model_mapping or CAUSAL in remote:
        return _causal() if remote or type(config) in _causal()._model_mapping else _named_class(config)
    mapping, saved = _causal()._model_mapping, getattr(config, "architectures", None) or []
    alone = mapping[type(config)].__name__ if type(config) in mapping else None
    return _causal() if alone in saved else multimodal


def _named_class(config: Any) -> Any:
    """The class that its config names, for a model that is in neither list of transformers (AudioFlamingo3)."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    found = getattr(transformers, name, None)
    if getattr(config, "is_encoder_decoder", False) or not (isinstance(found, type) and hasattr(found, "generate")):
        return _causal()  # which raises the error
    return found


def _causal() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM


@functools.cache
def trained_by(cls: Any, path: str, speaking: Any = None) -> Any:
    """A class of the same name derived from `cls`, with the forward, generate, embedding, head and base model of one of
    its modules.

    An omni model has no forward of its own: its thinker is trained, and answers in text. `speaking` is a forward that
    also trains the talker.
    """

    def of_the_module(name: str) -> Any:
        return lambda self, *args, **options: getattr(self.get_submodule(path), name)(*args, **options)

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        return (
            speaking(self, **inputs) if inputs.get("codes") is not None else self.get_submodule(path)(*args, **inputs)
        )

    others = ("generate", "get_input_embeddings", "get_output_embeddings", "resize_token_embeddings", "get_decoder")
    methods: dict[str, Any] = {name: of_the_module(name) for name in others}
    methods["base_model"] = property(lambda self: self.get_submodule(path).base_model)
    return type(cls.__name__, (cls,), {"forward": forward, **methods, "__module__": cls.__module__})


def save_extra_files(model: Any, folder: str | Path) -> None:
    """Copy files that `save_pretrained` does not write, although the model does not load without them (voices)."""
    from transformers.utils import cached_file

    family = family_of(getattr(model, "config", None))
    for name in family.files if family is not None and not getattr(model, "peft_config", None) else ():
        source = cached_file(model.name_or_path, name, _raise_exceptions_for_missing_entries=False)
        if source:
            shutil.copy(source, Path(folder) / name)
