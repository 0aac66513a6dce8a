"""The optimizer section of a DeepSpeed JSON, as a torch optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed.sections import Named

_NEEDS_OWN = "comes with DeepSpeed only; create your own and pass it as initialize(optimizer=...)"
_WHOLE = "needs whole parameters and comes with DeepSpeed only; use AdamW"
_COMPRESSED = "compresses gradients in communication, which is not supported here; use AdamW"
_REFUSED = {
    "lamb": _WHOLE,
    "onebitlamb": _COMPRESSED,
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muon": "is for matrices only; pass a torch.optim.Muon over these as initialize(optimizer=...)",
    "lion": _NEEDS_OWN,
    "muadam": _NEEDS_OWN,
    "muadamw": _NEEDS_OWN,
    "musgd": _NEEDS_OWN,
}
# Other names of arguments.
_MEANT = {"learning_rate": "lr", "epsilon": "eps", "adam_epsilon": "eps", "wd": "weight_decay", "beta": "betas"}
# Arguments of DeepSpeed's Adam that torch's does not need.
_ADAM_ONLY = ("bias_correction", "set_grad_none", "adamw_mode", "fp32_optimizer_states", "freeze_step")


def make(section: Named, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that `section` describes, over `parameters`.

    Raises:
        ConfigError: torch has no such optimizer, or it does not take these arguments.
    """
    if section.params.get("lr") == "auto":
        raise ConfigError('optimizer.params.lr is "auto", which a Trainer fills in. In your own loop give a number.')
    kind, settings = arguments(section)
    try:
        return kind(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {section.type}: {error}.") from None


def arguments(section: Named) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The class that `section` names and its arguments, without those that are "auto".

    Raises:
        ConfigError: torch has no such optimizer, or it does not take these arguments.
    """
    settings = {key: value for key, value in section.params.items() if value != "auto"}
    if "max_grad_norm" in settings:
        raise ConfigError("optimizer.params.max_grad_norm is not an optimizer argument: set gradient_clipping.")
    kind = _adam(section.type.lower(), settings) if section.type.lower() in ("adam", "adamw") else _torch(section.type)
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    check_arguments(kind, settings, "optimizer")
    return kind, settings


def _adam(name: str, settings: dict[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    """DeepSpeed's "Adam" decouples weight decay unless `adam_w_mode` is false; its default decay is 0."""
    decoupled = bool(settings.pop("adam_w_mode", True)) or name == "adamw"
    if not settings.get("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction: false is not supported by torch's Adam; leave it out.")
    for key in _ADAM_ONLY:
        settings.pop(key, None)
    if not settings.pop("torch_adam", False):
        settings.setdefault("weight_decay", 0.0)
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _torch(name: str) -> Callable[..., torch.optim.Optimizer]:
    kinds = {n: k for n, k in vars(torch.optim).items() if isinstance(k, type) and n != "Optimizer"}
    known = {n.lower(): k for n, k in kinds.items() if issubclass(k, torch.optim.Optimizer)}
    if name.lower() in _REFUSED and not (name.lower() == "lion" and "lion" in known):
        raise ConfigError(f"optimizer.type {name} {_REFUSED[name.lower()]}.")
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f" Did you mean {known[near[0]].__name__}?" if near else ""
        raise ConfigError(f"optimizer.type {name!r} is not a torch optimizer.{hint}")
    return known[name.lower()]


def check_arguments(kind: Callable[..., Any], settings: dict[str, Any], section: str, needed: bool = True) -> None:
    """Refuse arguments that `kind` does not take, with the nearest one that it does; and, with `needed`, missing ones
    that it requires."""
    name = getattr(kind, "__name__", str(kind))
    taken = dict(list(inspect.signature(kind).parameters.items())[1:])
    known = [key for key in taken if key != "last_epoch"]
    for key in settings:
        if key not in known:
            meant = [_MEANT[key]] if _MEANT.get(key) in known else difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {meant[0]}?" if meant else f" It has {', '.join(known)}."
            raise ConfigError(f"{section}.params.{key} is not an argument of {name}.{hint}")
    for key, parameter in taken.items():
        if needed and parameter.default is parameter.empty and key not in settings:
            raise ConfigError(f"{section}.params.{key} is missing, and {name} requires it.")
