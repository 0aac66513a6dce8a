"""`torch.autograd.grad` with respect to sharded parameters, and who asks for their nodes in the graph."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.errors import EngineError
from shardproof.zero.autograd import GatherNow
from shardproof.zero.tensors.parameter import ShardedParameter, by_engine


def grad_of_parameters(
    outputs: Any, inputs: tuple[Any, ...], grad_outputs: Any, strict: bool, materialize: bool, options: dict[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """Ask autograd for the gradients of the leaves behind `inputs` and gather what it returns.

    While this runs, the engines hand the reduced gradients of those leaves to autograd instead of
    adding them to `.grad`.

    Returns: for each input its whole gradient (the mean over ranks for parameters), or None.

    Raises:
        EngineError: of several gradients at once.
    """
    if options["is_grads_batched"]:
        raise EngineError(
            "torch.autograd.grad(..., is_grads_batched=True) with respect to sharded parameters is not supported: call "
            "it for each of the gradients, with retain_graph=True."
        )
    flats = {id(p.flat): p.flat for p in inputs if isinstance(p, ShardedParameter)}
    others = [x for x in inputs if not isinstance(x, ShardedParameter)]
    for flat in flats.values():
        flat.captured = set()
    try:
        leaves = [flat.leaf for flat in flats.values()]
        found = torch.autograd.grad(
            outputs, [*leaves, *others], grad_outputs=grad_outputs, allow_unused=True, **options
        )
    finally:
        used = {(key, index) for key, flat in flats.items() for index in flat.captured or ()}
        for flat in flats.values():
            flat.captured = None
    used = _used_anywhere(used, [x for x in inputs if isinstance(x, ShardedParameter)])
    wholes: dict[int, torch.Tensor] = {}
    for (key, flat), grad in zip(flats.items(), found, strict=False):
        if grad is not None:
            wholes[key] = GatherNow.apply(grad, flat) if flat.engine.sharded else grad
    rest = iter(found[len(flats) :])
    results: list[torch.Tensor | None] = []
    for x in inputs:
        if not isinstance(x, ShardedParameter):
            value = next(rest)
        elif (id(x.flat), x.index) in used:
            value = x.flat.view(wholes[id(x.flat)], x.index)
            value = value if value.requires_grad else value.data  # its edits are its own
        else:
            value = None
        if value is None and strict:
            name = f" ('{x.qualified_name}')" if isinstance(x, ShardedParameter) else ""
            raise RuntimeError(
                f"One of the differentiated Tensors{name} appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        results.append(torch.zeros_like(x) if value is None and materialize else value)
    return tuple(results)


def _used_anywhere(used: set[tuple[int, int]], params: list[ShardedParameter]) -> set[tuple[int, int]]:
    """Which of `params` a rank has used, by flat and index: the mean is that of all ranks, on all of them."""
    for engine, members in by_engine(params).items():
        if engine.comm.size > 1:
            engine.meet("differentiate a gradient")
            places = [(id(p.flat), p.index) for p in members]
            flags = torch.tensor([place in used for place in places], dtype=torch.int64, device="cpu")
            engine.comm.agree([], flags)
            used = used | {place for place, flag in zip(places, flags.tolist(), strict=True) if flag}
    return used


def view_like(p: Any, other: torch.Tensor) -> Any:
    """`p.view_as(p)` is how torch looks for the node that accumulates a gradient. A sharded parameter has none, and
    what is hooked to another node is never called."""
    if p is other and isinstance(p, ShardedParameter) and torch.is_grad_enabled():
        raise EngineError(
            f"The gradient accumulator of '{p.qualified_name}' was requested (get_gradient_edge, "
            "register_multi_grad_hook, _apply_optimizer_in_backward), but a sharded parameter has none. Use "
            "p.register_post_accumulate_grad_hook or p.register_hook."
        )
    return NotImplemented
