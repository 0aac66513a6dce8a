"""Optimizers other than torch's AdamW. Among them is AdamW with less memory: with its state in eight bits, or with
everything in bf16 and stochastic rounding.

| bytes per trained weight | master | gradient | state |
|---|---|---|---|
| `adamw` | 4 | 4 | 8 |
| `adamw_8bit` | 4 | 4 | 2 |
| `muon` | 4 | 4 | 4 for matrices |
| `galore` | 4 | 4 | 8 per row of a matrix and direction, 4 per column and direction |
| `adafactor` | 4 | 4 | one row and one column per matrix |
| `adamw`, `--stochastic-rounding` | 2 | 2 | 4 |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardproof.errors import ConfigError, did_you_mean
from shardproof.plugins import load
from shardproof.train.optim.galore import GaLore
from shardproof.train.optim.matrices import galore, muon
from shardproof.train.options.config import ADAFACTOR, EIGHT_BITS, GALORE, MUON, RunConfig
from shardproof.zero.optim.step import first_elements

# Arguments that --optimizer-arguments may not set: they have options of their own, or are set here.
OF_OPTIONS = ("params", "lr", "betas", "eps", "weight_decay", "adjust_lr_fn", "ns_coefficients")
OF_PLUGINS = ("model",)
CHUNKS = {"cpu": 1 << 15}  # elements updated at once, in float32: as many as a core's cache holds
CHUNK = 1 << 24  # elsewhere


def optimizer_of(config: RunConfig) -> Callable[..., torch.optim.Optimizer] | None:
    """A function that makes the chosen optimizer from groups of parameters and `lr`; None for torch's AdamW."""
    given: Any = config.optimizer_arguments
    registered = load(config.external_plugins).find("optimizer", config.optimizer)
    if registered is not None:
        return partial(registered, **given)
    adam: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optimizer == ADAFACTOR:
        return partial(adafactor, **given)
    if config.optimizer in (EIGHT_BITS, MUON, GALORE):
        make: Any = {EIGHT_BITS: adamw_8bit, MUON: muon, GALORE: galore}[config.optimizer]
        return partial(make, **adam, **given)
    return partial(AdamWBf16, seed=config.seed, **adam) if config.stochastic_rounding else None


def check_arguments(config: Any) -> None:
    """Raise ConfigError for --optimizer-arguments that the optimizer does not take."""
    name, given = config.optimizer, config.optimizer_arguments
    if not given:
        return
    if name in ("adamw", EIGHT_BITS):
        raise ConfigError(
            f"--optimizer-arguments does not apply to {name}, which is set by --adam-beta1, --adam-beta2, "
            "--adam-epsilon and --weight-decay."
        )
    registered = load(config.external_plugins).find("optimizer", name)
    kind: Any = registered or {MUON: torch.optim.Muon, GALORE: GaLore, ADAFACTOR: adafactor}[name]
    try:
        takes = inspect.signature(kind).parameters
    except ValueError:  # not a Python function
        return
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return
    known = [each for each in takes if each not in (OF_PLUGINS if registered else OF_OPTIONS)]
    known = known[2:] if registered else known  # groups and the learning rate, whatever their names are
    for argument, value in given.items():
        if argument not in known:
            hint = did_you_mean(argument, known)
            there = f"It takes {', '.join(known)}." if known else "It takes none."
            said = f"--optimizer-arguments {argument}={value}"
            raise ConfigError(f"{said}: --optimizer {name} has no such argument.{hint}\n{there}")
    if registered is None:
        for argument, value in given.items():
            if kinds := _kinds_of(takes[argument].default):
                wanted, what = kinds
                if not isinstance(value, wanted) or isinstance(value, bool) is not (wanted is bool):
                    raise ConfigError(f"--optimizer-arguments {argument}={value}: {argument} should be {what}.")
        try:
            kind([torch.nn.Parameter(torch.zeros(1, 1))], **given)
        except (TypeError, ValueError) as error:
            said = " ".join(f"{argument}={value}" for argument, value in given.items())
            raise ConfigError(f"--optimizer-arguments {said}: {error}") from error


def _kinds_of(default: Any) -> tuple[Any, str] | None:
    """The type of an argument, judged by its default, and a description of it; None if it may be anything."""
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        int: (int, "a whole number"),
        float: ((int, float), "a number"),
    }
    return kinds.get(type(default))


def made_by(
    make: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], lr: float, model: Any
) -> torch.optim.Optimizer:
    """The optimizer that `make` creates for groups of parameters. It is given the model if it takes an argument
    `model`.

    Raises:
        ConfigError: its step recomputes the loss itself (L-BFGS).
    """
    try:
        asks = "model" in inspect.signature(make).parameters
    except ValueError:  # not a Python function
        asks = False
    made = make(groups, lr=lr, **({"model": model} if asks else {}))
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"--optimizer: a step of {type(made).__name__} needs a closure that recomputes the loss, and the trainer"
            f" computes it once. Use an optimizer whose step() needs no closure."
        )
    return made


def adafactor(
    params: Any,
    lr: float = 1e-3,
    *,
    clip_threshold: float = 1.0,
    decay_rate: float = -0.8,
    beta1: float | None = None,
    scale_parameter: bool = False,
) -> torch.optim.Optimizer:
    """transformers' Adafactor (arXiv 1804.04235) with the given learning rate, as its Trainer uses it."""
    from transformers.optimization import Adafactor

    how: Any = {"clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
    return Adafactor(params, lr=lr, scale_parameter=scale_parameter, relative_step=False, **how)


def adamw_8bit(params: Any, smallest: int = 4096, **options: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW (arXiv 2110.02861) for parameters sharded into slices.

    Args:
        params: sharded parameters, or groups of them.
        smallest: number of elements below which an unsharded parameter keeps its state in fp32. bitsandbytes goes by
            the size of a slice, and so would keep the state of one parameter in several forms.
        options: those of `bitsandbytes.optim.AdamW8bit`.
    """
    from bitsandbytes.optim import AdamW8bit

    class AdamW8bitOfSlices(AdamW8bit):
        elementwise = True  # except that state is rounded in blocks

        def add_param_group(self, group: dict[str, Any]) -> None:
            super().add_param_group(group)
            small = [p.numel() < smallest for p in self.param_groups[-1]["params"]]  # within a step these are slices
            self.__dict__.setdefault("small", []).append(small)

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            bits = {"min_8bit_size": 2**63 if self.small[gindex][pindex] else 0}
            return {**super().get_config(gindex, pindex, group), **bits}

        def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
            if p.numel():
                super().init_state(group, p, gindex, pindex)
            else:  # empty, in the dtype that other ranks use
                dtype = torch.float32 if self.small[gindex][pindex] else torch.uint8
                nothing = {name: torch.zeros_like(p, dtype=dtype) for name in ("state1", "state2")}
                self.state[p].update(step=0, **nothing)

        def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
            if p.numel():
                super().update_step(group, p, gindex, pindex)

    return AdamW8bitOfSlices(params, **options)


class AdamWBf16(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) for parameters in bf16, with its state in bf16 too: computed in float32, then rounded
    stochastically, so that updates below the last of a weight's eight significant bits are right on average (arXiv
    2010.06192). Parameters of other dtypes keep their state in their own dtype and are not rounded; the real and
    imaginary parts of complex ones are updated separately.

    The random bits depend on the seed, the step, the parameter and the element. So the same gradients give the same
    bits on any number of ranks, at any ZeRO stage, and after resuming from a checkpoint.

    Args:
        params: parameters, or groups of them, in the same order on all ranks.
        seed: for the rounding.
    """

    rounds_by_chance = True  # a step may leave a parameter unchanged

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed

    def chunk(self, device: str) -> int:
        """Elements updated at once."""
        return CHUNKS.get(device, CHUNK)

    def starts(self, count: int, size: int) -> range:
        """Where the chunks of `count` elements begin."""
        return range(0, count, size)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first, number = first_elements(self), 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, first.get(id(p), 0), number)
                number += 1
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any], first: int, number: int) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        state["step"] += 1
        step = int(state["step"])
        salt = (self.seed * 1_000_003 + number) * 1_000_003 + step
        all_four: list[Any] = [p, p.grad, state["exp_avg"], state["exp_avg_sq"]]
        real = [torch.view_as_real(t) if t.is_complex() else t for t in all_four]
        flat = [t.reshape(-1) for t in real]  # a copy if the memory order differs (channels_last)
        size = self.chunk(p.device.type)
        wide = torch.promote_types(flat[0].dtype, torch.float32)
        for start in self.starts(flat[0].numel(), size):
            parts = [t[start : start + size] for t in flat]
            value, gradient, mean, square = (part.to(wide) for part in parts)
            _adamw(value, gradient, mean, square, step, group)
            stored = parts[0], parts[2], parts[3]
            noise = noise_of(first + start, len(value), salt, p.device) if p.dtype == torch.bfloat16 else None
            for number_of, (old, new) in enumerate(zip(stored, (value, mean, square), strict=True)):
                old.copy_(new if noise is None else rounded(new, (noise >> (16 * number_of)) & 0xFFFF))
        if not real[0].is_contiguous():
            real[0].copy_(flat[0].view(real[0].shape))


def _adamw(
    value: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int, group: Any
) -> None:
    """One step, in place, in float32 or higher precision."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    value.mul_(1 - lr * group["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    value.addcdiv_(mean, root, value=-lr / (1 - beta1**step))


def noise_of(first: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    """64 random bits (int64) for each of the elements `first` to `first + count`: splitmix64 of position and salt."""
    z = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    z = z * _signed(0x9E3779B97F4A7C15) + _signed(salt * 0xD1342543DE82EF95)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right, filling with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to one of their two neighbours in bf16, more likely the nearer one: right on average.

    Args:
        noise: for each value, a number from 0 to 65,535.
    """
    bits = values.view(torch.int32)
    near = ((bits + noise.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), near, values).to(torch.bfloat16)
