"""A model's processor, which turns text, images and audio into tensors. It also works without torchvision.

[Note: without torchvision] Without torchvision, transformers prepares images with PIL but has no video processor, and a
processor that needs one cannot be made. Here it gets one of ours (`videos.py`), in a class of the same name derived
from its own, so that the saved files are what transformers itself would save.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.derived import derived
from shardproof.models.families.known import family_of
from shardproof.models.loading.row_by_row import row_by_row
from shardproof.models.media.alike import VOXTRAL, called_alike
from shardproof.models.media.sounds import hearing_each_alone

TEKKEN = "tekken.json"  # Mistral's own tokenizer format
FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(source: str, trust_remote_code: bool = False, model: str | None = None) -> Any:
    """The processor of a model folder or hub id, with the model's chat template on its tokenizer; None for a text
    model. `model`: the source of the config that tells the family, if `source` is a folder of adapters.

    Raises:
        ConfigError: it cannot be loaded or trained with; the message says what is missing, or why.
    """
    name = processor_class(source)
    if name is None:
        return None
    try:
        processor = _load(source, name, trust_remote_code)
    except Exception as error:  # format loaders and the model's own code may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        wanted = [name for name in ("torchvision", "torchaudio") if name in str(error).lower() and not _has(name)]
        if wanted:
            reason = f"transformers has it with {wanted[0]} only: pip install the {wanted[0]} that goes with your torch"
        elif re.search("PIL|Pillow", str(error)) and not _has("PIL"):
            reason = "images need Pillow: pip install 'shardproof[media]'"
        raise ConfigError(f"The processor {name} of {source} cannot be loaded: {reason}") from error
    note_batches(processor.tokenizer)
    if name == VOXTRAL:  # once saved, its own methods read only this file
        processor.tokenizer.tekken_as_loaded = (_tekken_of(source), len(processor.tokenizer))
    _check_kind(type(processor))
    _check_places(processor)
    family = family_of(said_by(model or source, "config.json"))
    return row_by_row(prepared(processor), family.marks) if family is not None and family.marks else prepared(processor)


def processor_if_there(source: str, trust_remote_code: bool = False) -> Any:
    """As `load_processor`, for a model that may consist of a config alone: None if the processor cannot be loaded.

    Raises:
        ConfigError: it is of a kind that `load_processor` refuses.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = processor_class(source)
    kind = said_by(source, "config.json").get("model_type")
    cls = getattr(transformers, name or PROCESSOR_MAPPING_NAMES.get(kind) or "", None)
    if inspect.isclass(cls):
        _check_kind(cls)
    if kind in _REFUSED:
        raise ConfigError(_REFUSED[kind])
    try:
        processor = _load(source, name, trust_remote_code) if name is not None else None
    except Exception:  # reported when it is trained
        return None
    if processor is not None:
        _check_places(processor)
    return processor and prepared(processor)


def _check_kind(cls: Any) -> None:
    """Raise ConfigError for the processor class of a model that no command can train."""
    _check_causal(cls)
    _check_answers_in_words(cls)
    _check_takes_files(cls)


def _check_answers_in_words(cls: Any) -> None:
    """Raise ConfigError for a processor whose labels are audio. Those that others make with `output_labels`, as
    processors of transcription models do, are text."""
    if cls.__name__ in _SPEAK:
        raise ConfigError(
            f"{cls.__name__} belongs to a model whose answers are audio; the commands train answers in text."
            " A script with transformers' Trainer trains it at any stage, on the output of its processor with"
            " `output_labels=True`, as sharded(Trainer): from shardproof.integrations.transformers import sharded."
        )


def _check_causal(cls: Any) -> None:
    """Raise ConfigError for a processor that takes answers separately, like PaliGemma's: in rows like ours, its model
    would see later tokens of an answer."""
    if "suffix" in inspect.signature(cls.__call__).parameters:
        raise ConfigError(
            f"{cls.__name__} cannot be trained here: its model attends in both directions except within a"
            " `suffix`, so it would see the answers that it is to learn. Use a model that reads from left to right."
        )


def _check_takes_files(cls: Any) -> None:
    """Raise ConfigError for a processor that takes no files along with a text, or no text, like that of realtime
    Voxtral."""
    if cls.__name__ == VOXTRAL:
        return  # it does here, see `prepared`
    parameters = inspect.signature(cls.__call__).parameters
    files = {"images", "audio", "videos"} & set(parameters)
    if files and "text" not in parameters:
        raise ConfigError(
            f"{cls.__name__} takes files without text, so there is no place for questions and answers. Models"
            " with this processor cannot be used here."
        )
    if "text" in parameters and not files:
        raise ConfigError(
            f"{cls.__name__} takes text alone, and files only in conversations in its own format, in which answers"
            " cannot be located among the tokens. Models with this processor cannot be used here."
        )


def _check_places(processor: Any) -> None:
    """Raise ConfigError for a processor that does not put files where the text has marks for them: BLIP-2's puts an
    image before a text without marks."""
    if _puts_pictures_by_itself(processor):
        raise ConfigError(puts_first(type(processor).__name__))


def puts_first(processor: str) -> str:
    """The text of an error about a processor of this class."""
    return (
        f"{processor} puts an image before the text, wherever its mark is, so answers cannot be located"
        " among the tokens. Models with this processor cannot be used here."
    )


def writes_more(processor: str) -> str:
    """The text of an error about a processor of this class."""
    return (
        f"{processor} adds more than files to a text, so answers cannot be located among the tokens. Models"
        " with this processor cannot be trained here."
    )


_SPEAK = ("CsmProcessor", "HiggsAudioV2Processor")  # processors of models that answer in audio

# A processor that is present is tried; for these, the config alone must tell.
_REFUSED = {"kosmos-2.5": puts_first("Kosmos2_5Processor")}


def _puts_pictures_by_itself(processor: Any) -> bool:
    token = getattr(processor, "image_token", None)
    if token is None or not _has("PIL"):
        return False
    from PIL import Image

    try:
        made = processor(images=[[Image.new("RGB", (64, 64))]], text=["a"])
        return processor.tokenizer.convert_tokens_to_ids(str(token)) in made["input_ids"][0]
    except Exception:  # an image without a mark is an error, as it should be
        return False


def prepared(processor: Any) -> Any:
    """The processor, with a chat template and a padding token on its tokenizer; the result for audio does not depend on
    its batch."""
    tokenizer = processor.tokenizer
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    tokenizer.chat_template = processor.chat_template = template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return called_alike(hearing_each_alone(processor))


def note_batches(tokenizer: Any) -> None:
    """Remember on a freshly loaded tokenizer how its file pads and truncates batches; see `write_processing`."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        tokenizer.batches_as_loaded = (backend.padding, backend.truncation)


def write_processing(processing: Any, folder: str | Path) -> None:
    """Write a processor or a tokenizer to a folder as it was loaded: otherwise `tokenizer.json` would contain the
    padding and truncation of the last batch and apply it to all texts. `tekken.json` does not contain added tokens."""
    tokenizer = getattr(processing, "tokenizer", processing)
    if (noted := getattr(tokenizer, "batches_as_loaded", None)) is not None:
        backend, (padding, truncation) = tokenizer.backend_tokenizer, noted
        backend.no_padding() if padding is None else backend.enable_padding(**padding)
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
    processing.save_pretrained(str(folder))
    tekken, tokens = getattr(tokenizer, "tekken_as_loaded", (None, 0))
    if tekken is not None and tokens == len(tokenizer) and Path(tekken).parent != Path(folder):
        shutil.copyfile(tekken, Path(folder, TEKKEN))


def file_parts(processor: Any) -> dict[str, str]:
    """The classes of a processor's parts that prepare files. transformers has an image class for torchvision and one
    for PIL, whose values differ in the last of 8 bits; it uses whatever is installed, and saved files do not say
    which."""
    names = ("image_processor", "video_processor", "feature_extractor")
    parts = {name: getattr(processor, name, None) for name in names}
    return {name: type(part).__name__ for name, part in parts.items() if part is not None}


def scaling_down(processor: Any, most: int) -> int | None:
    """Make a processor scale larger images down to `most` pixels. Returns the actual limit; None if it cannot.

    Processors that turn images into grids of patches (the Qwens') count pixels: their `longest_edge` is not an edge.
    They scale small images up to `shortest_edge` pixels, which is therefore the lowest possible limit.
    """
    images: Any = getattr(processor, "image_processor", None)
    if "max_pixels" not in getattr(getattr(images, "valid_kwargs", None), "__annotations__", ()):
        return None
    least, now = images.size["shortest_edge"], images.size["longest_edge"]
    images.size = {"shortest_edge": least, "longest_edge": min(now, max(most, least))}
    return int(images.size["longest_edge"])


def square_of_token(processor: Any) -> tuple[int, int] | None:
    """For processors that scale and cut images into squares (the Qwens' and similar ones): the side in pixels of the
    square that becomes a token, and the smallest number of squares. None for others."""
    images: Any = getattr(processor, "image_processor", None)
    patch, merged = (getattr(images, name, None) for name in ("patch_size", "merge_size"))
    scales = "max_pixels" in getattr(getattr(images, "valid_kwargs", None), "__annotations__", ())
    if not (scales and isinstance(patch, int) and isinstance(merged, int)):
        return None
    return patch * merged, -(-images.size["shortest_edge"] // (patch * merged) ** 2)


def processor_class(source: str) -> str | None:
    """The name of the processor's class in the model's files; None if only a tokenizer is needed."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import cached_file

    for file in FILES:
        name = said_by(source, file).get("processor_class")
        if name and not name.endswith(("Tokenizer", "TokenizerFast")):
            return str(name)
    if Path(source).expanduser().is_file():
        return None
    media = any(cached_file(source, file, **QUIET) for file in FILES[:2])
    kind = said_by(source, "config.json").get("model_type")
    return PROCESSOR_MAPPING_NAMES.get(kind) if kind and media else None


# A missing file is not an error.
QUIET = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}


def said_by(source: str, file: str) -> dict[str, Any]:
    """The contents of a JSON file of a model folder or hub id; empty if there is none. The source may be a config
    file."""
    content = content_of(source, file)
    return content if isinstance(content, dict) else {}


def content_of(source: str, file: str) -> Any:
    """The contents of a JSON file of a model folder or hub id, or None."""
    from transformers.utils import cached_file

    folder = Path(source).expanduser()
    path = (folder if file == "config.json" else None) if folder.is_file() else cached_file(str(folder), file, **QUIET)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else None


def _load(source: str, name: str, trust_remote_code: bool) -> Any:
    import transformers

    cls = getattr(transformers, name, None)
    videos = cls is not None and "video_processor" in cls.get_attributes() and not _has("torchvision")
    if cls is None or not (videos or _tekken_of(source)):
        return transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    values, more = cls.get_processor_dict(source)
    parts = [_part(attribute, source, values) for attribute in cls.get_attributes()]
    return (with_our_videos(cls) if videos else cls).from_args_and_dict(parts, values, **more)


def load_fast_tokenizer(source: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder or hub id, as transformers loads it, but never through the package
    mistral-common.

    If that is installed (vLLM depends on it), transformers reads `tekken.json` with it, whatever other files there are.
    Such a tokenizer has no chat template and no offsets, which we need to locate answers. If there is no other file,
    `tekken.json` is converted, with the chat template that mistral-common writes for it unless there is one.
    """
    import transformers

    tekken = _tekken_of(source)
    if tekken is None:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if content_of(source, "tokenizer.json") is not None:
        return transformers.AutoTokenizer.from_pretrained(source, mistral_format=False)
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(tekken)
    tokenizer.name_or_path = source
    return tokenizer


def _tekken_of(source: str) -> str | None:
    """The file in Mistral's own tokenizer format, if the model has one."""
    from transformers.utils import cached_file

    found = None if Path(source).expanduser().is_file() else cached_file(source, TEKKEN, **QUIET)
    return str(found) if found else None


def _part(attribute: str, source: str, values: Mapping[str, Any]) -> Any:
    import transformers
    from transformers.utils import cached_file

    if attribute == "video_processor":
        from shardproof.models.media.videos import FrameVideos

        images = transformers.AutoImageProcessor.from_pretrained(source)
        config = values.get("video_processor") or said_by(source, "video_preprocessor_config.json")
        if font := config.get("font"):
            config = config | {"font": cached_file(source, font, **QUIET) or font}
        return FrameVideos(images, config)
    if attribute == "tokenizer":
        return load_fast_tokenizer(source)
    auto = {
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    return auto[attribute].from_pretrained(source)


@functools.cache
def with_our_videos(cls: Any) -> Any:
    """A class derived from this processor class of transformers, with the same name, that accepts our video processor.
    See [Note: without torchvision]."""

    def check_argument_for_proper_class(self: Any, name: str, value: Any) -> Any:
        return type(value) if name == "video_processor" else cls.check_argument_for_proper_class(self, name, value)

    return derived(with_our_videos, cls, {"check_argument_for_proper_class": check_argument_for_proper_class})


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
