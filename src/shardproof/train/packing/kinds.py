"""The kinds of packing that `shardproof export --quantize` writes, and how a weight is rounded for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Quantize = Literal["fp8", "int8", "int4", "nf4"]
# compressed-tensors' name for each kind. The other kinds belong to bitsandbytes.
PRESETS = {"fp8": "FP8_DYNAMIC", "int8": "W8A8", "int4": "W4A16"}
GROUP = 128  # weights of a row that share a scale in four bits
TOGETHER = 2**18  # weights
SHRUNK = 20  # number of smaller scales to try, down to 0.6 of the one that reaches the largest weight


@dataclass(frozen=True)
class Packing:
    """How a model is to be packed.

    Attributes:
        group_size: how many weights of a row share a scale (`int4`).
        keep: regular expressions; weights whose names match one (re.search) stay unpacked.
        dataset: rows to calibrate with. Without any, weights are rounded without calibration.
        val_dataset: rows to report the loss on before and after; without any, those of `dataset`.
        reading: run options for reading these rows, in place of those of the model's own run.
        samples: the most rows to use of each.
    """

    kind: Quantize
    group_size: int = GROUP
    keep: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    val_dataset: tuple[str, ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 256

    @property
    def calibrates(self) -> bool:
        return bool(self.dataset) and self.kind in ("int4", "int8")


def check_installed(kind: str) -> None:
    """Raise ConfigError if the package for this kind is not installed."""
    package, extra = ("compressed_tensors", "packed") if kind in PRESETS else ("bitsandbytes", "eightbit")
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise ConfigError(
            f"--quantize {kind} needs the package {name}, which is not installed.\n"
            f"Install it: pip install 'shardproof[{extra}]', or pip install {name}"
        )


def scheme_of(packing: Packing) -> Any:
    """The compressed-tensors scheme for one of its kinds, including the format."""
    import torch
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(PRESETS[packing.kind], ["Linear"])
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = packing.group_size
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    return scheme


def scales_of(weight: Tensor, args: Any, importance: Tensor | None = None) -> Tensor:
    """The scales for rounding a weight [out, in] under `args` from compressed-tensors: [out, groups] in its dtype, or
    [out, 1] with one per row.

    In four bits, some smaller scales are tried too, and those with the least squared error are used: clipping the
    largest weights may cost less than finer steps gain for all others. `importance`: of each column, [in].
    """
    import torch

    return torch.cat([_scales_of(part, args, importance) for part in weight.split(rows_together(weight))])


def rows_together(weight: Tensor) -> int:
    """How many rows to process at once, so that temporaries stay small compared to the weight."""
    return max(1, TOGETHER // weight.shape[1])


def _scales_of(weight: Tensor, args: Any, importance: Tensor | None) -> Tensor:
    from compressed_tensors.quantization.utils import calculate_qparams

    size = args.group_size or weight.shape[-1]
    groups = weight.float().unflatten(-1, (-1, size))
    best, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    best = best.to(weight.dtype)
    if args.num_bits > 4:
        return best
    weights = None if importance is None else importance.float().unflatten(0, (-1, size))
    full, least = best, _error(groups, best, args, weights)
    for step in range(1, SHRUNK + 1):
        tried = (full * (1 - 0.4 * step / SHRUNK)).to(weight.dtype)
        error = _error(groups, tried, args, weights)
        better = error < least
        best, least = best.where(~better, tried), least.where(~better, error)
    return best


def _error(groups: Tensor, scales: Tensor, args: Any, weights: Tensor | None) -> Tensor:
    """The squared rounding error of each group [..., groups, size] under its scale [..., groups]."""
    errors = (rounded(groups, scales.unsqueeze(-1), args) - groups).square()
    return (errors if weights is None else errors * weights).sum(-1)


def rounded(values: Tensor, scales: Tensor, args: Any) -> Tensor:
    """Values rounded to integers by scales that broadcast to them, and scaled back, in fp32."""
    most = 2 ** (args.num_bits - 1)
    scales = scales.float()
    return (values / scales).round().clamp(-most, most - 1) * scales
