"""Promise: a sharded parameter is a tensor to every operation of torch, on the samples that torch tests these with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import shardproof
from shardproof.errors import EngineError

pytest.importorskip("expecttest")  # which torch's samples want

# What these give is not defined, or they give memory another size.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
# They look at what lies behind a tensor in memory, which for a parameter is another.
OF_MEMORY = ("as_strided", "resize_as_")


class Holder(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value.detach().clone().contiguous())


def samples(at_most: int) -> Iterator[tuple[Any, Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name in (*UNDEFINED, *OF_MEMORY):
            continue
        torch.manual_seed(0)  # on all ranks the same
        try:
            found = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
        except Exception:  # some want packages of their own
            continue
        plain = [s for s in found if isinstance(s.input, torch.Tensor) and s.input.layout == torch.strided]
        wanted = [s for s in plain if s.input.numel() and s.input.dtype == torch.float32]
        yield from ((op, sample) for sample in wanted[:at_most])


def outcome(compute: Callable[..., list[Any]], *args: Any) -> Any:
    """What it gives, or that it fails, or that the engine refuses it."""
    torch.manual_seed(0)
    try:
        return compute(*args)
    except EngineError as error:
        return error
    except Exception:
        return "fails"


def leaves(value: Any) -> list[Any]:
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in tree_leaves(value)]


def by(function: Any, holder: Holder, sample: Any, in_place: bool) -> list[Any]:
    """What comes out, and the gradient that it gives."""
    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs))
    if in_place:
        with torch.no_grad():
            function(holder.weight, *args, **kwargs)
        return leaves(holder.weight)
    result = function(holder.weight, *args, **kwargs)
    grown = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_complex()]
    if grown:
        dense = [x.to_dense() if x.layout != torch.strided else x for x in grown]
        sum(x.double().nan_to_num().sum() for x in dense).backward()
    return leaves(result) + leaves(holder.weight.grad)


def of_gradient(function: Any, holder: Holder, sample: Any, in_place: bool) -> list[Any]:
    holder.weight.sum().backward()
    with torch.no_grad():
        holder.weight.grad.copy_(sample.input)
        result = function(holder.weight.grad, *sample.args, **sample.kwargs)
    return leaves(holder.weight.grad if in_place else result)


def of_data(function: Any, holder: Holder, sample: Any, in_place: bool) -> list[Any]:
    result = function(holder.weight.data, *sample.args, **sample.kwargs)
    return leaves(holder.weight if in_place else result)


def difference(plain: Any, ours: Any) -> str:
    """Where ours differs, or nothing. What is refused by name is no silent difference, where the shape would change."""
    if isinstance(ours, EngineError) and ("keeps its shape" in str(ours) or "its layout in memory" in str(ours)):
        return ""
    if not isinstance(plain, list) or not isinstance(ours, list):
        return "" if type(plain) is type(ours) else f"{plain!r:.80} became {ours!r:.200}"
    if len(plain) != len(ours):
        return f"{len(plain)} values became {len(ours)}"
    for one, other in zip(plain, ours, strict=True):
        if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {tuple(one.shape)} became {other.dtype} {tuple(other.shape)}"
        if not torch.allclose(one, other.to(one.dtype), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"off by {(one - other).abs().max()}"
    return ""


def differences(stage: int, compute: Callable[..., list[Any]], at_most: int) -> tuple[int, list[str]]:
    warnings.filterwarnings("ignore")
    checked, found = 0, []
    for op, sample in samples(at_most):
        for function in filter(None, dict.fromkeys((op.op, op.method_variant, op.inplace_variant))):
            in_place = function is op.inplace_variant
            holders = Holder(sample.input), shardproof.shard(Holder(sample.input), stage)
            if op.name == "addbmm" and in_place:
                continue  # torch's own gives another shape
            plain, ours = (outcome(compute, function, holder, sample, in_place) for holder in holders)
            checked += 1
            if told := difference(plain, ours):
                found.append(f"{op.name} {op.variant_test_name}{' in place' if in_place else ''}: {told}")
    return checked, found


@pytest.mark.slow
@pytest.mark.parametrize("compute", [by, of_gradient, of_data])
@pytest.mark.parametrize("stage", [0, 3])
def test_every_operation_gives_what_it_gives_of_a_plain_one(stage, compute):
    checked, found = differences(stage, compute, 4)
    assert not found
    assert checked > 3000


@pytest.mark.slow
@pytest.mark.parametrize("compute", [by, of_gradient, of_data])
def test_so_it_does_on_two_ranks(run2, compute):
    for checked, found in run2(differences, 3, compute, 1, timeout=300):
        assert not found
        assert checked > 900


def of_lists(stage: int | None, name: str, gradients: bool, which: int) -> list[Any] | str:
    """What an operation on a list of parameters, or of their gradients, gives and leaves behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if stage is not None:
        shardproof.shard(model, stage, units=[nn.Linear])
    model(torch.ones(2, 3)).square().sum().backward()
    params = list(model.parameters())
    targets = [p.grad for p in params] if gradients else params
    others = [torch.rand(p.shape) + 0.5 for p in params]
    operands = ([], [others], [others, others], [2.0], [others, others, 0.5], [others, 0.5], [torch.tensor(2.0)])
    operands += ([[1.0, 2.0, 3.0, 4.0]], [targets], [2])
    with torch.no_grad():
        result = outcome(getattr(torch, name), targets, *operands[which])
    if isinstance(result, str):
        return result
    if name.endswith("_"):
        assert all(a is b for a, b in zip(result, targets, strict=True))
        result = []
    return leaves([list(result), params, [p.grad for p in params]])


def differences_of_lists(stage: int) -> tuple[int, list[str]]:
    names = [name for name in dir(torch) if name.startswith("_foreach_")]
    checked, found = 0, []
    for name in names:
        for gradients in (False, True):
            for which in range(10):
                plain, ours = (of_lists(s, name, gradients, which) for s in (None, stage))
                checked += not isinstance(plain, str)
                if told := difference(plain, ours):
                    found.append(f"{name} {'gradients' if gradients else 'parameters'} {which}: {told}")
    return checked, found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_so_does_every_operation_on_lists(run2, stage):
    for checked, found in (differences_of_lists(stage), *run2(differences_of_lists, stage, timeout=300)):
        assert not found
        assert checked > 300


def lists_of_other_shapes(stage: int | None) -> list[torch.Tensor]:
    """What is given beside parameters has another shape than they have, and a factor of its own for each."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if stage is not None:
        shardproof.shard(model, stage)
    params, one, several = list(model.parameters()), torch.full((1,), 0.5), torch.full((2, 1), 2.0)
    with torch.no_grad():
        torch._foreach_addcdiv_(params, [several, one], [one, one], [0.5, 0.25])
        torch._foreach_addcmul_(params, [several, one], [one, one], value=0.5)
        torch._foreach_maximum_(params, [several, one])
        torch._foreach_mul_([*params, torch.ones(2)], [several, one, one])
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("stage", [0, 3])
def test_lists_of_operands_are_spread_over_parameters(run2, stage):
    expected = lists_of_other_shapes(None)
    for found in run2(lists_of_other_shapes, stage):
        torch.testing.assert_close(found, expected)
