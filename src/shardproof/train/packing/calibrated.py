"""Calibrated rounding of weights: GPTQ (arXiv 2210.17323), with the most important columns first.

The rounding error of a column is compensated by the columns that are still to be rounded, based on the inputs of its
layer. llm-compressor and GPTQModel do this too, but neither can be installed with this version of transformers and
torch; they need their own code for each model, and support neither experts in one tensor nor rows with files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardproof.data.encoding.beside import told_of
from shardproof.train.packing.kinds import Packing, rounded, scales_of, scheme_of
from shardproof.train.packing.places import Places

if TYPE_CHECKING:
    from torch import Tensor, nn

TOGETHER = 128  # columns that are rounded before the rest is updated
DAMPED = 0.01  # fraction of the mean of the diagonal that is added to it


class _Reached(Exception):
    """A forward pass has run as far as needed."""


def calibrate(model: Any, places: Places, batches: Iterable[dict[str, Any]], packing: Packing) -> dict[str, Tensor]:
    """Round the weights to be packed, in place: block by block, each by the inputs it gets from the rounded blocks
    before it.

    Args:
        batches: batches of rows on the model's device; iterated over once for each block.

    Returns: the scales used, by the names of linear layers in files.
    """
    args = scheme_of(packing).weights
    scales: dict[str, Tensor] = {}
    for path in told_of(places.blocks, len(places.blocks), "calibrating blocks"):
        mine = [name for name in places.layers if name.startswith(f"{path}.")]
        if not mine:
            continue
        with torch.no_grad():
            for name, sums in _inputs_of(model, model.get_submodule(path), mine, batches).items():
                weight = model.get_parameter(name)
                found = _fit(weight, sums, args)
                scales |= _in_files(model, name, found)
    return scales


def _fit(weight: nn.Parameter, sums: Tensor, args: Any) -> Tensor:
    """Round a weight [out, in], or expert weights [experts, out, in], in place. Returns the scales."""
    stacked = weight.data if weight.dim() == 3 else weight.data[None]
    many = sums if sums.dim() == 3 else sums[None]
    found = []
    for matrix, products in zip(stacked, many, strict=True):
        values, scale = fitted(matrix, products, args)
        matrix.copy_(values)
        found.append(scale)
    return torch.stack(found) if weight.dim() == 3 else found[0]


def fitted(weight: Tensor, products: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """A weight [out, in], rounded so that the outputs of its layer change least.

    Args:
        products: the sum of outer products of the layer's inputs: [in, in], fp32.
        args: compressed-tensors' description of how weights are rounded.

    Returns: the weight in its dtype, and the scales: [out, groups].
    """
    seen = products.diagonal().clone()
    scales = scales_of(weight, args, seen if seen.any() else None)
    each = scales.float().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    order = seen.argsort(descending=True)
    lower = _inverse(products[order][:, order])
    if lower is None:  # the layer got no inputs
        return rounded(weight.float(), each, args).to(weight.dtype), scales
    values, each = weight.float()[:, order], each[:, order]
    for start in range(0, values.shape[1], TOGETHER):
        part, inverse = values[:, start : start + TOGETHER], lower[start : start + TOGETHER]
        errors = torch.empty_like(part)
        for i in range(part.shape[1]):
            before = part[:, i].clone()
            part[:, i] = rounded(before, each[:, start + i], args)
            errors[:, i] = (before - part[:, i]) / inverse[i, start + i]
            part[:, i + 1 :] -= errors[:, i : i + 1] * inverse[i, start + i + 1 : start + part.shape[1]]
        values[:, start + TOGETHER :] -= errors @ inverse[:, start + TOGETHER :]
    return values[:, order.argsort()].to(weight.dtype), scales


def _inverse(products: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse, or None if all inputs are zero."""
    mean = products.diagonal().mean()
    if not mean > 0:
        return None
    damp = DAMPED
    while True:
        damped = products + damp * mean * torch.eye(len(products), device=products.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        damp *= 10


def _in_files(model: Any, name: str, scales: Tensor) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    saved = revert_weight_conversion(model, {name: scales.cpu()})
    return {found.removesuffix(".weight"): value.contiguous() for found, value in saved.items()}


class _Sums:
    """Sums of outer products of inputs. Layers with the same input tensor (q_proj, k_proj, v_proj) share one."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self._now: list[tuple[Tensor, Tensor]] = []  # inputs in this forward, each with the sum it was added to

    def begin(self) -> None:
        self._now.clear()

    def add(self, name: str, given: Tensor) -> None:
        for other, total in self._now:
            if other is given and self.of.setdefault(name, total) is total:
                return
        total = self.of.setdefault(name, given.new_zeros(2 * given.shape[-1:], dtype=torch.float32))
        _add(total, given)
        self._now.append((given, total))


def _add(total: Tensor, given: Tensor) -> None:
    flat = given.reshape(-1, given.shape[-1]).float()
    total.addmm_(flat.T, flat)


def _inputs_of(model: Any, block: nn.Module, names: list[str], batches: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """For each parameter, the sum of outer products of its layer's inputs: [in, in], or one for each expert."""
    sums = _Sums()
    with _watched(model, block, names, sums):
        for batch in batches:
            sums.begin()
            with suppress(_Reached):
                model(**batch)
    return {name: sums.of[name] for name in names if name in sums.of}


@contextmanager
def _watched(model: Any, block: nn.Module, names: list[str], sums: _Sums) -> Iterator[None]:
    def reached(*_: Any) -> None:
        raise _Reached

    hooks = [block.register_forward_hook(reached)]
    experts: dict[str, list[str]] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        if model.get_parameter(name).dim() == 3:
            experts.setdefault(path, []).append(own)
            continue

        def linear(_: Any, given: tuple[Tensor, ...], name: str = name) -> None:
            sums.add(name, given[0])

        hooks.append(model.get_submodule(path).register_forward_pre_hook(linear))
    for path in experts:

        def routed(module: Any, given: Any, named: Any, path: str = path) -> None:
            _add_experts(sums, path, module, *given, **named)

        hooks.append(model.get_submodule(path).register_forward_pre_hook(routed, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add_experts(
    sums: _Sums, path: str, module: Any, hidden_states: Tensor, top_k_index: Tensor, *_: Any, **__: Any
) -> None:
    """Add the inputs of the experts that tokens are routed to, and the inputs of their second product. The few other
    kinds of experts are rounded without calibration."""
    gated = hasattr(module, "gate_up_proj") and getattr(module, "has_gate", False)
    if not gated or module.has_bias or module.is_transposed:
        return
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    inner = module.down_proj.shape[-1]
    for name, size in (("gate_up_proj", states.shape[-1]), ("down_proj", inner)):
        shape = (len(module.down_proj), size, size)
        sums.of.setdefault(f"{path}.{name}", states.new_zeros(shape, dtype=torch.float32))
    for expert in top_k_index.unique().tolist():
        if expert >= len(module.down_proj):  # marks tokens without an expert
            continue
        given = states[(top_k_index.view(len(states), -1) == expert).any(-1)]
        _add(sums.of[f"{path}.gate_up_proj"][expert], given)
        _add(sums.of[f"{path}.down_proj"][expert], module._apply_gate(F.linear(given, module.gate_up_proj[expert])))
