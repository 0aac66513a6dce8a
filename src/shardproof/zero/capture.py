"""`torch.autograd.grad` with respect to sharded parameters, and to views of what was gathered."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from shardproof.errors import EngineError
from shardproof.zero.autograd import GatherNow, Unshard, in_backward
from shardproof.zero.parameter import ShardedParameter


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
            "torch.autograd.grad(..., is_grads_batched=True) with respect to sharded parameters is not done here: call "
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
        used = {key: flat.captured for key, flat in flats.items()}
        for flat in flats.values():
            flat.captured = None
    wholes: dict[int, torch.Tensor] = {}
    for (key, flat), grad in zip(flats.items(), found, strict=False):
        if grad is not None:
            wholes[key] = GatherNow.apply(grad, flat) if flat.engine.sharded else grad
    rest = iter(found[len(flats) :])
    results = []
    for x in inputs:
        if not isinstance(x, ShardedParameter):
            value = next(rest)
        elif id(x.flat) in wholes and x.index in (used[id(x.flat)] or ()):
            value = x.flat.view(wholes[id(x.flat)], x.index)
            value = value if value.requires_grad else value.data  # its edits are its own
        else:
            value = None
        results.append(value)
    return _told(inputs, results, strict, materialize)


def _told(inputs: Any, results: list[Any], strict: bool, materialize: bool) -> tuple[torch.Tensor | None, ...]:
    """What to say of inputs that were not used."""
    for i, (x, value) in enumerate(zip(inputs, results, strict=True)):
        if value is None and strict:
            name = f" ('{x.qualified_name}')" if isinstance(x, ShardedParameter) else ""
            raise RuntimeError(
                f"One of the differentiated Tensors{name} appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        results[i] = torch.zeros_like(x) if value is None and materialize else value
    return tuple(results)


_grad = torch.autograd.grad


@functools.wraps(_grad)
def grad_inside_backward(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """A function that takes parameters as arguments, and computes with their module once more in its backward, asks
    there for gradients of its arguments. In a forward these are views of what was gathered for it, and the module then
    computes with what is gathered anew: what it asks for are this rank's gradients of the parameters behind both."""
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs) if isinstance(inputs, list | tuple) else ()
    found = enumerate(map(_parameter_behind, given)) if in_backward() else ()
    edges = {i: edge for i, edge in found if edge is not None}
    if not edges:
        options = only_inputs, allow_unused, is_grads_batched, materialize_grads
        return _grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *options)
    wanted = [*given, *edges.values()]
    grads = _grad(outputs, wanted, grad_outputs, retain_graph, create_graph, True, True, is_grads_batched)
    results = list(grads[: len(given)])
    for i, more in zip(edges, grads[len(given) :], strict=True):
        results[i] = more if results[i] is None else results[i] if more is None else results[i] + more
    return _told(given, results, not (allow_unused or materialize_grads), materialize_grads)


def _parameter_behind(x: Any) -> Any:
    """Where gradients of a parameter arrive of which `x` is a gathered view."""
    node = x.grad_fn if type(x) is torch.Tensor else None
    if not isinstance(node, Unshard._backward_cls):  # type: ignore[attr-defined]
        return None
    node = cast("Any", node)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(node.flat.params[node.indices[x.output_nr]])


torch.autograd.grad = grad_inside_backward
