"""Load a model folder as a sharded model, without any rank ever holding all of it.

[Note: how it is loaded]
transformers' `from_pretrained` does everything except read values: it finds the files, builds the model on the meta
device, initialises weights that the files lack, ties weights and reports. Instead of reading, each parameter gets a
function that reads a range of it, and `shardproof.shard` makes each rank read the part it keeps. So names, dtypes,
random numbers and warnings are those of transformers, and the model is the one that a single process would have loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardproof.checkpoint.parts import CHUNK
from shardproof.errors import ConfigError
from shardproof.integrations.adapter_init import Less
from shardproof.integrations.initial import initialise
from shardproof.integrations.readers import CODES, UNPACKS, Converted, Sources, Stacked, Stored, by_expert, stored
from shardproof.models.loading.classes import with_values
from shardproof.models.loading.packed import unread as unread_scales
from shardproof.zero.api import shard
from shardproof.zero.build import READER

log = logging.getLogger("shardproof")

_ANOTHER_WAY = "this release of transformers loads models differently"


class _CannotBePlanned(Exception):
    """Its text is the reason why these files have to be loaded unsharded."""


def load_pretrained(
    source: str, stage: int = 3, *, kind: str | type[Any] = "AutoModelForCausalLM", sharding: Any = None, **options: Any
) -> Any:
    """Load a transformers model from a folder or the hub, sharded. Call it on all ranks.

    Each rank reads its ranges of the safetensors files. Weights that the files lack are initialised as by
    `from_pretrained`, with the first rank's random state.

    Args:
        source: as for `from_pretrained`.
        stage: as for `shardproof.shard`.
        kind: the class to load with, or its name in transformers.
        sharding: further arguments of `shardproof.shard`, by name.
        options: arguments of `from_pretrained`.

    Returns: the model, in eval mode as `from_pretrained` leaves it.

    Raises:
        EngineError: as `shardproof.shard`; and whatever `from_pretrained` raises.
    """
    return shard(without_values(kind, source, **options), stage, **(sharding or {}))


def without_values(kind: str | type[Any], source: str, **options: Any) -> Any:
    """The same model as from `from_pretrained`, but its parameters read their values later, and take no memory until
    then.

    It can get adapters, and be sharded. Computing with it before that gives NaN. If files cannot be read in ranges
    (formats other than safetensors, packed weights, code that comes with the model) it is an ordinary model with
    values, and a warning is logged.
    """
    import transformers

    loader = getattr(transformers, kind) if isinstance(kind, str) else kind
    planned: list[nn.Module] = []
    try:
        model = with_values(_deferred(loader, planned), source, **options)
        if not planned:
            log.warning("%s is loaded in full on every rank: its code is not part of transformers.", source)
    except _CannotBePlanned as reason:
        log.warning("%s is loaded in full on every rank: %s.", source, reason)
        return with_values(loader, source, **options)
    except (AttributeError, TypeError) as error:  # from private parts of transformers; a caller's mistake is raised now
        model = with_values(loader, source, **options)
        log.warning("%s is loaded in full on every rank: %s (%s).", source, _ANOTHER_WAY, error)
        return model
    for module in planned:
        module.__class__ = type(module).__mro__[1]
        _leave_meta(module)
    return model


def _leave_meta(model: nn.Module) -> None:
    """Put parameters that are still to be read on the CPU, as a single NaN expanded to their shape: code that adds
    tensors next to a weight uses its device, and on the meta device adapters would lose their initial values."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and READER in p.__dict__:
                if id(p) not in seen:
                    nothing = torch.full((), float("nan") if p.is_floating_point() else 0, dtype=p.dtype, device="cpu")
                    seen[id(p)] = nn.Parameter(nothing.expand(p.shape), requires_grad=p.requires_grad)
                    seen[id(p)].__dict__.update(p.__dict__)
                module._parameters[name] = seen[id(p)]


def _deferred(loader: type[Any], planned: list[nn.Module]) -> type[Any]:
    """A subclass of a model class or Auto class whose `from_pretrained` does not read values."""
    if hasattr(loader, "_model_mapping"):
        return type(loader.__name__, (loader,), {"_model_mapping": _Deferring(loader._model_mapping, planned)})

    whole: list[Callable[[], None]] = []

    def load(model: Any, state_dict: Any, files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        info = plan(model, files, config)
        planned.append(model)
        return info, None

    def leave_parameters(model: Any, missing: set[str], *places: Any) -> None:
        buffers = {name for name in missing if not isinstance(model.get_parameter_or_buffer(name), nn.Parameter)}
        loader._move_missing_keys_from_meta_to_device(model, buffers, *places)
        whole.append(partial(loader._move_missing_keys_from_meta_to_device, model, missing, *places))

    def initialise_missing(model: Any, *args: Any) -> None:
        if not initialise(model):
            whole[-1]()
            loader._initialize_missing_keys(model, *args)

    own = {name: getattr(loader, name) for name in ("__module__", "__qualname__", "__doc__")}
    own["_load_pretrained_model"] = staticmethod(load)
    own["_move_missing_keys_from_meta_to_device"] = leave_parameters
    own["_initialize_missing_keys"] = initialise_missing
    return type(loader.__name__, (loader,), own)


class _Deferring:
    """transformers' mapping from configurations to models, with models that do not read values."""

    def __init__(self, mapping: Any, planned: list[nn.Module]) -> None:
        self.mapping, self.planned = mapping, planned

    def __getitem__(self, key: Any) -> Any:
        found = self.mapping[key]
        if isinstance(found, (list, tuple)):
            return tuple(_deferred(model, self.planned) for model in found)
        return _deferred(found, self.planned)

    def __contains__(self, key: Any) -> bool:
        return key in self.mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mapping)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mapping, name)


def lend_readers(model: nn.Module) -> None:
    """Give readers to parameters that PEFT has derived from modules without values, unless a loaded adapter has set
    their values since: copies (`modules_to_save`, tuned norms), and the norms of rows (DoRA)."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, p in named.items():
        reader = None if READER in p.__dict__ else _lent(model, named, name)
        if reader is not None and bool(p.isnan().all()):
            setattr(p, READER, reader)


def _lent(model: nn.Module, named: dict[str, nn.Parameter], name: str) -> Callable[[int, int], torch.Tensor] | None:
    """The reader of a PEFT parameter, if it was derived from one without values."""
    copied, is_copy, after = name.rpartition(".modules_to_save.")
    adapted, is_length, _ = name.rpartition(".lora_magnitude_vector.")
    tuned, is_norm, own = name.rpartition(".ln_tuning_layers.")
    sources = (
        (is_copy, f"{copied}.original_module.{after.partition('.')[2]}"),
        (is_norm, f"{tuned}.base_layer.{own.partition('.')[2]}"),
        (is_length, f"{adapted}.base_layer.weight"),
    )
    original = named.get(next((source for there, source in sources if there), ""))
    if original is None or READER not in original.__dict__:
        return None
    if is_copy or is_norm:
        read: Callable[[int, int], torch.Tensor] = original.__dict__[READER]
        return read
    return partial(_lengths, original, bool(model.get_submodule(name.rpartition(".")[0]).fan_in_fan_out))


def _lengths(weight: nn.Parameter, transposed: bool, first: int, last: int) -> torch.Tensor:
    """The norms of rows of a matrix without values, or of columns (`transposed`: a Conv1D, an embedding), for which all
    of it is read. With new adapters, these are DoRA's initial magnitudes."""
    read, width = weight.__dict__[READER], weight.numel() // weight.shape[0]
    read = read.read if isinstance(read, Less) else read  # the subtracted part is in the adapter
    if transposed:
        rows = read(0, weight.numel()).view(weight.shape).T[first:last]
    else:
        rows = read(first * width, last * width).view(-1, width)
    return torch.linalg.norm(rows, dim=1)


# --- what is read from where -------------------------------------------------------------------------


def plan(model: Any, files: Sequence[str] | None, config: Any) -> Any:
    """Give each parameter on the meta device that is in the files its reader; buffers are read at once.

    The order of renamings and conversions is that of `convert_and_load_state_dict_in_model` in transformers.

    Args:
        config: the `LoadStateDictConfig` of transformers.

    Returns: its `LoadStateDictInfo`.

    Raises:
        _CannotBePlanned: these files have to be loaded in full."""
    try:
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            build_glob_alternation,
            dot_natural_key,
            rename_source_key,
        )
        from transformers.utils.loading_report import LoadStateDictInfo
    except ImportError as error:  # another release of transformers
        raise _CannotBePlanned(f"{_ANOTHER_WAY} ({error})") from error
    unpacks = getattr(getattr(config.hf_quantizer, "quantization_config", None), "dequantize", False)
    if not (config.hf_quantizer is None or unpacks) or config.device_mesh is not None or config.device_map is not None:
        raise _CannotBePlanned("its weights are packed, or placed on several devices")
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise _CannotBePlanned("it is not in safetensors files")
    here = model.state_dict(keep_vars=True)
    mapping = config.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    several: list[set[str]] = [set() for _ in dataclasses.fields(LoadStateDictInfo)[5:]]  # one field since 5.16
    info = LoadStateDictInfo(set(here), set(), set(), [], {}, *several)
    dtypes = None
    if config.dtype_plan:
        dtypes = build_glob_alternation(list(config.dtype_plan))
    groups: dict[str, tuple[Any, list[tuple[str, Stored]]]] = {}
    unread: list[str] = []
    try:
        tensors = stored(files)
    except KeyError as error:
        raise _CannotBePlanned("'{}' has the dtype {}".format(*error.args)) from error
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, here)
        if target not in here and name in here:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, here)
        if target in here:
            converter = None if pattern is None else by_pattern[pattern]
            groups.setdefault(target, (converter, []))[1].append((pattern or name, tensors[name]))
            continue
        unread.append(name)
        if pattern is not None:
            first, *_ = by_pattern[pattern].target_patterns
            info.unexpected_keys |= {target.replace(first, other) for other in by_pattern[pattern].target_patterns}
        else:
            info.unexpected_keys.add(target)
    _check_codes(tensors, unread)
    planned = _Planned(model.config, here)
    for target, (converter, parts) in groups.items():
        found: dict[str, tuple[tuple[int, ...], Any]] = {}
        if converter is None:
            found[target] = parts[-1][1].shape, parts[-1][1]
        else:
            for name, made in _convert(converter, target, planned, parts, on_meta=True).items():
                found[name] = tuple(made.shape), _converting(converter, target, planned, parts, name, made)
        for name, (shape, reader) in found.items():
            _give(model, here, name, shape, reader, info, _planned_dtype(name, dtypes, config))
    _find_ties(model, info)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return info


def _check_codes(tensors: Mapping[str, Stored], unread: Sequence[str]) -> None:
    """Refuse 8-bit weights whose scales, stored next to them, transformers does not read: it would take the codes for
    values."""
    for name in unread:
        codes = tensors.get(re.sub(r"_scale(_inv)?$", "", name))
        if codes is not None and codes.dtype in CODES:
            raise ConfigError(unread_scales(codes.name, codes.file))


class _Planned:
    """The attributes of a model that converters use, recorded now: when parameters are read, adapters may surround
    them."""

    def __init__(self, config: Any, here: dict[str, Any]) -> None:
        self.config = config
        self._like = {name: torch.empty_like(value, device="meta") for name, value in here.items()}

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._like[name]

    def get_submodule(self, place: str) -> Any:
        own = ((name.rpartition("."), value) for name, value in self._like.items())
        return SimpleNamespace(**{last: value for (before, _, last), value in own if before == place})


def _find_ties(model: Any, info: Any) -> None:
    """If tied weights are in the files twice, leave one out if they are equal; otherwise they are not tied."""
    for name, source in list(model.all_tied_weights_keys.items()):
        if name in info.missing_keys or source in info.missing_keys:
            continue
        one, other = model.get_parameter(name), model.get_parameter(source)
        readers = one.__dict__[READER], other.__dict__[READER]
        spans = [(at, min(at + CHUNK, one.numel())) for at in range(0, one.numel(), CHUNK)]
        if one.shape == other.shape and all(torch.equal(*(read(*span) for read in readers)) for span in spans):
            info.missing_keys.add(name)
        else:
            log.warning("'%s' and '%s' are tied in the configuration but differ in the files: not tied.", name, source)
            model.all_tied_weights_keys.pop(name)


def _planned_dtype(name: str, dtypes: Any, config: Any) -> torch.dtype | None:
    """The dtype in which transformers always keeps this weight, regardless of the model's dtype, or None."""
    hit = dtypes[0].search(name) if dtypes is not None else None
    return config.dtype_plan[dtypes[1][hit.lastgroup]] if hit is not None else None


def _convert(converter: Any, target: str, model: Any, parts: Sources, on_meta: bool = False) -> dict[str, torch.Tensor]:
    """The converter's results for these tensors, by name; without values if `on_meta`."""
    own = copy.deepcopy(converter)
    for pattern, part in parts:
        empty = partial(torch.empty, part.shape, dtype=part.dtype, device="meta")
        own.add_tensor(target, part.name, pattern, empty if on_meta else part.whole)
    made = own.convert(target, model=model, config=model.config)
    # Some are parameters; a tensor that they are copied into would keep their graph.
    return {name: (value[0] if isinstance(value, list) else value).detach() for name, value in made.items()}


def _converting(converter: Any, target: str, model: Any, parts: Sources, name: str, made: torch.Tensor) -> Any:
    """The reader of a converted tensor; `made` is that tensor on the meta device."""

    def convert(sources: Sources) -> torch.Tensor:
        return _convert(converter, target, model, sources)[name]

    if len(parts) == 1 and [type(operation).__name__ for operation in converter.operations] == [UNPACKS]:
        return parts[0][1]  # the converter is for all weights, but this one is not packed
    experts = by_expert(converter.operations, parts, made.shape)
    if experts is None:
        return Converted(convert, parts)
    return Stacked(convert, experts, made[0].numel(), made.dtype)


def _give(
    model: Any,
    here: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    reader: Any,
    info: Any,
    dtype: torch.dtype | None,
) -> None:
    """Set `reader` as the reader of the tensor with this name."""
    entry = here.get(name)
    if not isinstance(entry, torch.Tensor):
        raise _CannotBePlanned(f"'{name}' is not a tensor of the model")
    info.missing_keys.discard(name)
    if tuple(entry.shape) != shape:
        info.mismatched_keys.add((name, shape, tuple(entry.shape)))
        return
    place, _, last = name.rpartition(".")
    module = model.get_submodule(place)
    dtype = dtype or entry.dtype
    if isinstance(entry, nn.Parameter):
        if entry.dtype != dtype:
            entry = nn.Parameter(torch.empty_like(entry, dtype=dtype), requires_grad=dtype.is_floating_point)
            setattr(module, last, entry)
        setattr(entry, READER, reader)
    else:
        entry = reader(0, entry.numel()).to(dtype).view(shape).clone()
        setattr(module, last, entry)
    entry.__dict__["_is_hf_initialized"] = True  # so that transformers does not initialise it
