"""The model of a run as an ordinary model folder: adapters merged, in another dtype, split by size, and checked."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardproof.checkpoint.manifest import MANIFEST
from shardproof.data.encoding.embed import prompt_of
from shardproof.errors import ConfigError
from shardproof.integrations.prepared import hold_buffers
from shardproof.integrations.saved import readable_as_the_rest
from shardproof.models.forward import without_adapters
from shardproof.models.loading.classes import load_body, save_extra_files, with_values
from shardproof.models.loading.mtp import carry_mtp
from shardproof.models.loading.processors import scaling_down, square_of_token, write_processing
from shardproof.models.scorers import SCORER
from shardproof.plugins import Plugins
from shardproof.train.adapters.adding import with_adapters
from shardproof.train.adapters.beginning import begin_adapters, check_begun
from shardproof.train.adapters.reference import load_beside_reference
from shardproof.train.answers.loaded import loaded_as, model_folder, on_base, tell_lacking
from shardproof.train.embedding import recipe as embedding
from shardproof.train.embedding.pooling import Embedding, embedding_in
from shardproof.train.folder import ADAPTER, BASE, CONFIG, MODEL, base_of, recorded_in, tell_other_weights
from shardproof.train.merging import MERGED, logits, merged
from shardproof.train.model.changes import changed_by, grow, stretching
from shardproof.train.model.loading import (
    TINY,
    also_stops,
    causal_lm,
    check_base,
    first_line,
    load_model,
    load_processing,
    tokenizer_of,
)
from shardproof.train.model.made_anew import noting
from shardproof.train.model.reward_models import judges, load_judge, pads_with
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.packing.kinds import Packing, check_installed
from shardproof.train.packing.packer import Packed, Packer
from shardproof.train.reranker.recipe import GENERATIVE
from shardproof.train.reranker.scoring import Scoring, scoring_in, scoring_of
from shardproof.train.rows.media import files_taken
from shardproof.train.seq_cls.labelling import labels_in, labels_of, load_classifier
from shardproof.train.seq_cls.recipe import trained
from shardproof.train.settings import mixed_precision

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ROUNDED = 1e-2  # error allowed for rounding in half precision
OF_SOME_CPUS = "support_avx512bf16_for_cpu"  # an attribute of bitsandbytes' layers


@dataclass
class Exported:
    """What an export wrote.

    Attributes:
        merged_error: how far the logits are from those before merging adapters; None if there were none, or there was
            not enough memory to compare.
        max_pixels: the number of pixels to which the run scaled images down.
        scaled: the number to which the exported processor scales them by itself.
        further: how many tensors belong to multi-token prediction layers, which are copied from the base.
        packed: the result of --quantize.
    """

    folder: Path
    files: int
    size: int
    merged_error: float | None
    max_pixels: int | None
    scaled: int | None
    further: int
    packed: Packed | None = None


def export(
    run: str,
    output: str,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    plugins: Plugins | None = None,
    model_type: str | None = None,
    packing: Packing | None = None,
) -> Exported:
    """Write the model of a run, or of one of its checkpoints, to a folder that `from_pretrained` loads.

    The folder is loaded again; it must hold the weights that were written, and give the same logits up to rounding: the
    last bits of a product with a single row depend on where its weights start in memory.

    Args:
        dtype: one of DTYPES; None keeps the dtype of the weights.
        plugins, model_type: may load the model instead of transformers, see `registered_model`.
        packing: how to pack the written model, which is then loaded and compared again.

    Raises:
        ConfigError: there is no model, the folder is not empty, the model cannot be packed like this, or the result
            computes something else.
        DataError: rows to calibrate with cannot be used.
    """
    import torch

    target = Path(output).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{output} exists already.\nName another folder.")
    if os.path.ismount(target):  # a folder cannot be renamed onto it
        raise ConfigError(f"{output} is a mount point.\nName a folder in it: {target / MODEL}.")
    target = target.resolve() if target.is_symlink() else target
    if packing is not None:
        check_installed(packing.kind)
    model, processing = _load(run, trust_remote_code, plugins or Plugins(), model_type)
    path = Path(run).expanduser()
    how, scoring = _embedding_of(path, files_taken(processing)), _scoring_of(path, processing)
    max_pixels, tokens = (_recorded(path).get(name) for name in ("max_pixels", "max_image_tokens"))
    if tokens is not None and (square := square_of_token(processing)) is not None:
        max_pixels = tokens * square[0] ** 2
    scaled = scaling_down(processing, max_pixels) if max_pixels is not None else None
    also_stops(without_adapters(model), tokenizer_of(processing))
    ids = _some_tokens(model, tokenizer_of(processing))
    error = None
    if getattr(model, "peft_config", None):
        model, error = merged(model, ids, rounded=dtype is None)
    if packing is not None and dtype is None and model.dtype == torch.float32:
        dtype = "bf16"  # packed weights are not used with fp32
    if dtype is not None:
        for value in model.state_dict(keep_vars=True).values():  # buffers that are rebuilt on loading keep their dtype
            if value.is_floating_point():
                value.data = value.data.to(getattr(torch, DTYPES[dtype]))
    before = logits(model, ids)
    packer = None
    if packing is not None:
        pooling = how.pooling if how is not None else None
        packer = Packer(model, processing, packing, _recorded(path), path, pooling)
    expected = logits(model, ids) if packer is not None else before
    sums, kept = _sums(model), model.dtype
    aside = target.with_name(target.name + ".unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    with _written(aside):
        model.save_pretrained(aside, max_shard_size=max_shard_size)
        write_processing(processing, aside)
        save_extra_files(model, aside)
        if how is not None:
            how.write(aside, model.config.get_text_config().hidden_size)
        if scoring is not None:
            scoring.write(aside)
        further = carry_mtp(model, aside, None if dtype is None else getattr(torch, DTYPES[dtype]))
        readable_as_the_rest(aside)
    del model
    gc.collect()
    load = _loader(aside, processing, plugins or Plugins(), model_type)
    again = load(str(aside), dtype=kept, trust_remote_code=trust_remote_code).eval()
    far = float((logits(again, ids) - expected).abs().max() / expected.abs().max())
    # When loaded in another dtype, some models keep a few modules in fp32.
    same = dtype is not None or _sums(again) == sums
    if not (same and far <= (MERGED if kept == torch.float32 else ROUNDED)):
        raise ConfigError(f"{aside} does not compute the same as the model of {run}. It has been kept for inspection.")
    packed = None
    if packer is not None:
        del again
        gc.collect()
        with _written(aside):
            packer.pack(aside, kept)
        with contextlib.redirect_stderr(io.StringIO()):  # compressed-tensors always shows progress bars
            again = load(str(aside), how=plainly, dtype=kept, trust_remote_code=trust_remote_code).eval()
            moved = float((logits(again, ids) - before).abs().max() / before.abs().max())
        packed = packer.check(again, moved, aside)
    aside.rename(target)
    files = list(target.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return Exported(target, len(files), size, error, max_pixels, scaled, further, packed)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raise ConfigError if a folder cannot be written, and remove it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as problem:
        shutil.rmtree(folder, ignore_errors=True)
        why = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"{folder} cannot be written: {why}.") from problem


def plainly(kind: Any, source: str, **options: Any) -> Any:
    """Load a model as users do: packed weights stay packed, and are not unpacked for training."""
    model = kind.from_pretrained(source, **options)
    for module in model.modules():
        if hasattr(module, OF_SOME_CPUS):  # this layout needs rows that its blocks divide
            setattr(module, OF_SOME_CPUS, False)
    return model


def _sums(model: Any) -> dict[str, int]:
    """Checksums of the bytes of each tensor of the model."""
    import torch

    values = model.state_dict().items()
    return {name: zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy()) for name, value in values}


def _some_tokens(model: Any, tokenizer: Any) -> Any:
    """Ordinary tokens, of shape (1, 16): an image placeholder would need an image."""
    import torch

    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    plain = [i for i in range(model.config.get_text_config().vocab_size) if i not in special]
    chosen = torch.randint(0, len(plain), (16,), generator=torch.Generator().manual_seed(0))
    return torch.tensor([[plain[i] for i in chosen.tolist()]])


def _load(run: str, trust_remote_code: bool, plugins: Plugins, model_type: str | None) -> tuple[Any, Any]:
    """The model of a run folder, a model folder or a checkpoint, and its processor or tokenizer."""
    path = Path(run).expanduser()
    if (path / MANIFEST).is_file():
        return _load_checkpoint(path, trust_remote_code, plugins, model_type)
    folder = model_folder(run)
    processing = load_processing(str(folder), SftConfig(trust_remote_code=trust_remote_code))
    adapters = (folder / ADAPTER).is_file()
    source, changes = (base_of(folder), changed_by(folder)) if adapters else (str(folder), None)
    check_base(run, source, folder / ADAPTER)
    if adapters:
        tell_other_weights(folder.parent, source)
    change = {"change": found} if (found := stretching(changes)) else {}
    try:
        load = _loader(folder, processing, plugins, loaded_as(folder, plugins, model_type))
        how = {"how": noting(with_values), "trust_remote_code": trust_remote_code}
        model = _ordinary(load(source, dtype="auto", **how, **change))
    except ConfigError:
        raise
    except Exception as error:  # loaders of formats and model code may raise anything
        raise ConfigError(f"The model {source} cannot be loaded: {first_line(error)}") from error
    tell_lacking(model, source, folder if adapters else None)
    if adapters:
        if changes is not None and changes.new_special_tokens:
            grow(model, tokenizer_of(processing))
        model = on_base(model, folder, source)
    return model, processing


def _recorded(path: Path) -> dict[str, Any]:
    """The recorded options of the run that a run folder or a checkpoint belongs to."""
    return recorded_in(path.parent if (path / MANIFEST).is_file() else path)


def _embedding_of(path: Path, files: tuple[str, ...]) -> Embedding | None:
    """How the model in a run folder, a model folder or a checkpoint embeds texts and `files`; None if it does not."""
    if not (path / MANIFEST).is_file():
        return embedding_in(model_folder(str(path)))
    options = _recorded(path)
    if options.get("task") != "embedding":
        return None
    return Embedding(options["pooling"], prompt_of(options.get("system"), files), files)


def _scoring_of(path: Path, processing: Any) -> Scoring | None:
    """How the model scores pairs, if its config does not say."""
    if not (path / MANIFEST).is_file():
        return scoring_in(model_folder(str(path)))
    options = _recorded(path)
    generative = options.get("task") == GENERATIVE
    return scoring_of(SftConfig(**options), processing) if generative else None


def _ordinary(model: Any) -> Any:
    """Unpack four-bit weights: merging adapters into those would round what they add."""
    from shardproof.integrations.four_bits import unpacked

    return unpacked(model, model.dtype)


def _loader(folder: Path, processing: Any, plugins: Plugins, model_type: str | None) -> Callable[..., Any]:
    """The function that loads the model of a folder, which may be a reward or an embedding model."""
    if embedding_in(folder) is not None:
        return load_body
    if judges(folder):
        return partial(load_judge, pad_token_id=tokenizer_of(processing).pad_token_id, labels=labels_in(folder))
    return partial(causal_lm, plugins=plugins, model_type=model_type)


# Settings of how a run computes, which do not belong to its model: it is compared with the model loaded from the
# folder.
PLAINLY = {"attn": None, "packing": False, "padding_free": False, "sequence_parallel": 1}


def _load_checkpoint(path: Path, trust_remote_code: bool, plugins: Plugins, model_type: str | None) -> tuple[Any, Any]:
    """The initial model of a checkpoint's run, with the weights of the checkpoint."""
    from shardproof.train.run import processing_of

    file = path.parent / CONFIG
    if not file.is_file():
        raise ConfigError(f"{path} is not in a run folder: there is no {file}, which names its model.")
    options = _recorded(path)
    given = {"external_plugins": list(plugins.files), "model_type": model_type or options.get("model_type")}
    given["trust_remote_code"] = trust_remote_code or options.get("trust_remote_code", False)
    given |= {name: value for name, value in PLAINLY.items() if name in options}
    try:
        config = (RlhfConfig if "rlhf_type" in options else SftConfig)(**{**options, **given})
    except ValidationError as error:
        first = error.errors()[0]
        named = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} has {named!r}, which this version does not accept: {first['msg']}.") from error
    source = config.model
    if not source:
        raise ConfigError(f"{file} does not name the model of {path}: add 'model: FOLDER' to it.")
    if source == TINY:
        # A finished run keeps its initial model only for adapters; otherwise its own model has the same shape.
        kept = [path.parent / name for name in (BASE, MODEL) if (path.parent / name / "config.json").is_file()]
        if not kept:
            raise ConfigError(f"{path.parent} lacks the folder {BASE}, the model that {path} is a checkpoint of.")
        source = str(kept[0])
    check_base(path, source, file)
    if config.tuner != "full":
        tell_other_weights(path.parent, source)
        check_begun(config, path)
    processing = processing_of(source, config)
    if options.get("rlhf_type") == "rm":
        head = {"num_labels": 1, "pad_token_id": tokenizer_of(processing).pad_token_id}
        model = with_adapters(_ordinary(load_model(source, config, SCORER, **head)), config, "SEQ_CLS")
    elif isinstance(config, SftConfig) and config.task == "embedding":
        if not files_taken(processing):
            processing.chat_template = None
        model = embedding.trained(_ordinary(load_model(source, config, embedding.BODY)), config)
    elif isinstance(config, SftConfig) and config.task in ("seq_cls", "reranker"):
        if config.plain:
            processing.chat_template = None
        model, info = load_classifier(source, config, labels_of(config))
        pads_with(model, tokenizer_of(processing).pad_token_id)
        model = trained(_ordinary(model), config, info)
    else:
        model = with_adapters(_ordinary(load_model(source, config, model_type=config.model_type)), config)
    begin_adapters(model, config, [path])
    if (precision := mixed_precision(config.precision)) is not None:
        hold_buffers(model, precision.compute)  # as in the run
    load_beside_reference(model, path)
    return model, processing
