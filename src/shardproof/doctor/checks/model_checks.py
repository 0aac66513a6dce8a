"""Checks of a loaded model, with its adapters, before it is sharded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardproof.doctor.checks.check import Check, option_in, some
from shardproof.errors import ConfigError
from shardproof.integrations.four_bits import count_weights
from shardproof.train.adapters.begun import other_bases
from shardproof.train.options.config import RunConfig

AREA, CPU = "model", torch.device("cpu")
_OF_TORCH = set(vars(nn.Module()))  # attributes of every torch module


def loading(info: Mapping[str, Any]) -> list[Check]:
    """`info`: transformers' report about loading (`output_loading_info`)."""
    missing, extra = sorted(info.get("missing_keys", ())), sorted(info.get("unexpected_keys", ()))
    wrong = sorted(str(key[0] if isinstance(key, (tuple, list)) else key) for key in info.get("mismatched_keys", ()))
    if wrong:
        cause = "These weights have a different shape in the files than in the model, and were newly initialised."
        return [
            Check(AREA, "weights", "fail", f"{len(wrong)}: {some(wrong)}", cause, "a config.json that fits the weights")
        ]
    if missing:
        cause = "These weights are not in the files: they were newly initialised, at random."
        return [
            Check(AREA, "weights", "fail", f"{len(missing)}: {some(missing)}", cause, "the folder of the full model")
        ]
    if extra:
        cause = "The files hold weights that the model does not have; these are ignored."
        return [Check(AREA, "weights", "warn", f"{len(extra)}: {some(extra)}", cause)]
    return [Check(AREA, "weights", "ok", "none missing, none left over")]


def without_heads(model: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' report without a classifier's head, which is newly created, and other heads, which are left out."""
    body = f"{model.base_model_prefix}."
    kept = {
        kind: [name for name in info.get(kind, ()) if name.startswith(body) and ".pooler." not in name]
        for kind in ("missing_keys", "unexpected_keys")
    }
    return {**info, **kept}


def body_only(info: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model without a head: other weights in its files are left out, and a pooler is not used."""
    missing = [name for name in info.get("missing_keys", ()) if not name.startswith("pooler.")]
    return {**info, "missing_keys": missing, "unexpected_keys": []}


def not_loaded(error: ConfigError) -> Check:
    """The check for a model that cannot be built as the options ask."""
    option = option_in(error, "--model") if str(error).startswith("--") else "--model"
    if option == "--target-modules":
        cause = "There would be nothing to train."
        return Check(AREA, "adapters", "fail", _line(error), cause, "--target-modules all-linear")
    if option == "--model":
        return Check(AREA, "model", "fail", _line(error), "It cannot be loaded.", option)
    return Check(AREA, "parts", "fail", _line(error), "The model does not have what this option needs.", option)


def adapted(config: RunConfig) -> list[Check]:
    """Whether --adapters were trained on this model, as far as names tell."""
    cause = "Adapters give different results on weights other than those they were trained with."
    return [Check(AREA, "adapters", "warn", told, cause, "--model") for told in other_bases(config)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def trained(model: nn.Module, config: RunConfig, writes: bool = True) -> list[Check]:
    """What is trained, and what is frozen although no option asks for it. `writes`: whether the model generates
    text."""
    params = dict(model.named_parameters())
    frozen = [name for name, p in params.items() if not p.requires_grad]
    total, mine = count_weights(model)
    seen = f"{mine / 1e6:,.2f} of {total / 1e6:,.2f} M parameters"
    if not mine:
        return [Check(AREA, "trained", "fail", seen, "Nothing is trained.", "--tuner, --freeze, --train-parts")]
    if config.tuner == "full":
        from shardproof.models.families.anatomy import anatomy
        from shardproof.train.model.parts import named, parts_trained, passed_by

        found = anatomy(model)
        chosen = parts_trained(model, found.parts, config)
        asked = named(model, "--freeze-parameters", config.freeze_parameters)
        idle = [] if writes else [id(parameter) for parameter in passed_by(model)]
        meant = [name for name in frozen if found.part_of.get(name) in chosen and id(params[name]) not in idle]
        unasked = [name for name in meant if name not in asked]
        if unasked:
            parts = ", ".join(sorted({found.part_of[name] for name in unasked}))
            cause = f"--tuner full trains everything, but the model's own code freezes these (part: {parts})."
            option = "requires_grad_(True) where the model is created, or --freeze if that is intended"
            return [Check(AREA, "trained", "fail", f"{seen}; frozen: {some(unasked)}", cause, option)]
        left = sorted({found.part_of.get(name, "?") for name in frozen})
        seen += f"; not trained: {', '.join(left)}" if left else ""
    return [Check(AREA, "trained", "ok", seen + (f", {len(frozen)} tensors frozen" if frozen else ""))]


def places(model: nn.Module, device: torch.device = CPU, ranks: int = 1, rounded: bool = False) -> list[Check]:
    """Whether the model has values, whether it is on the computing device (`device`, of rank 0) or can be moved there
    by the engine, and its dtypes. `rounded`: whether updates of half-precision weights are rounded stochastically, so
    that none is lost."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, t in tensors if t.is_meta]
    if meta:
        cause = "These have a shape but no values: they were never loaded."
        return [
            Check(AREA, "devices", "fail", some(meta), cause, "load them, or leave the part out (--freeze does not)")
        ]
    tied_down = pinned(model, device, ranks)
    if tied_down:
        cause = (
            f"The run computes on {device}, and the engine moves the weights there, but these modules move their "
            "inputs elsewhere: their first forward would fail with tensors on two devices."
        )
        option = "load the model without device_map: the engine places it, one part on each rank"
        return [Check(AREA, "devices", "fail", some(tied_down), cause, option)]
    hidden = out_of_sight(model)
    apart = [text for text, place in hidden if torch.device(place) != device]
    if apart:
        cause = (
            "These modules are in a list, dict or attribute that torch does not search: the engine does not move them "
            f"to {device}, where the run computes, and they are neither trained nor saved."
        )
        option = "nn.ModuleList or nn.ModuleDict instead of a list or dict in the model's code"
        return [Check(AREA, "devices", "fail", some(apart), cause, option)]
    devices = Counter(str(t.device) for _, t in tensors)
    checks = []
    if len(devices) > 1:
        most = devices.most_common(1)[0][0]
        strays = [name for name, t in tensors if str(t.device) != most]
        where = sorted({str(t.device) for _, t in tensors} - {most})
        cause = f"Most of the model is on {most}. The engine moves these there, which takes memory as well."
        seen = f"{len(strays)} on {', '.join(where)}: {some(strays)}"
        checks.append(
            Check(
                AREA, "devices", "warn", seen, cause, "leave the part out (--enable-audio-output no), or allow for it"
            )
        )
    elif hidden:
        cause = "They are in a list, dict or attribute that torch does not search: they are neither trained nor saved."
        seen = some([text for text, _ in hidden])
        checks.append(
            Check(AREA, "devices", "warn", seen, cause, "nn.ModuleList or nn.ModuleDict, if that is not intended")
        )
    else:
        checks.append(Check(AREA, "devices", "ok", f"all on {next(iter(devices), 'none')}"))
    kinds = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad)
    seen = ", ".join(f"{count} in {kind}" for kind, count in kinds.items())
    half = [k for k in kinds if k not in ("float32", "float64")]
    if half and rounded:
        checks.append(Check(AREA, "master weights", "ok", f"{seen}, updates are rounded stochastically"))
    elif half:
        cause = "Updates of less than about 1/256 of a weight are lost in half precision."
        checks.append(
            Check(AREA, "master weights", "warn", seen, cause, "load in float32; --precision bf16 computes in half")
        )
    else:
        checks.append(Check(AREA, "master weights", "ok", seen))
    return checks


def pinned(model: nn.Module, device: torch.device, ranks: int) -> list[str]:
    """Modules that accelerate's hooks (`device_map`) run on a device where this run, or one of its ranks, does not
    compute."""
    found = []
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            place = getattr(each, "execution_device", None)
            if place is None:
                continue
            wanted = torch.device(device.type, place) if isinstance(place, int) else torch.device(place)
            elsewhere = wanted.type != device.type or wanted.index not in (None, device.index)
            if elsewhere or (wanted.index is not None and ranks > 1):  # each rank has its own device
                found.append(f"{name or 'the model'} ({wanted})")
    return found


def out_of_sight(model: nn.Module) -> list[tuple[str, str]]:
    """Modules with parameters that `model.modules()` does not include, and the device of each."""
    known, found = {id(module) for module in model.modules()}, []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_TORCH:
                continue
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for each in inside:
                first = next(each.parameters(), None) if isinstance(each, nn.Module) and id(each) not in known else None
                if first is not None:
                    found.append((f"{name}.{key}".lstrip(".") + f" ({type(each).__name__})", str(first.device)))
    return found


def embedding_of(model: nn.Module) -> Any:
    """The token embedding; if the model has none of its own (an omni model uses its thinker's), that of its first part
    with one; or None."""
    for module in model.modules():
        get = getattr(module, "get_input_embeddings", None)
        with contextlib.suppress(NotImplementedError, AttributeError):
            found = get() if get is not None else None
            if hasattr(found, "weight"):
                return found
    return None


def tied(model: nn.Module) -> list[Check]:
    """Whether head and embedding are tied, as the config says."""
    config = getattr(model, "config", None)
    head = embedding = None
    with contextlib.suppress(NotImplementedError, AttributeError):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if config is None or head is None or embedding is None or not hasattr(embedding, "weight"):
        return []
    same, said = head.weight is embedding.weight, bool(getattr(config, "tie_word_embeddings", False))
    if same != said:
        cause = "The config and the weights disagree: saving goes by one of them, and loading by the other."
        seen = f"tie_word_embeddings is {said}, the head {'is' if same else 'is not'} the embedding"
        return [Check(AREA, "tied weights", "warn", seen, cause, "set tie_word_embeddings to what is intended")]
    return [
        Check(AREA, "tied weights", "ok", "head and embedding are tied" if same else "head and embedding are separate")
    ]


def finite(model: nn.Module) -> list[Check]:
    """Whether the weights are finite."""
    bad = [n for n, p in model.named_parameters() if not p.is_meta and not bool(torch.isfinite(p.detach()).all())]
    if bad:
        return [
            Check(AREA, "values", "fail", some(bad), "These weights contain NaN or inf.", "another copy of the model")
        ]
    return []
