"""torch's loss in chunks, on the meta device: there torch tells the shapes of its results alone, and neither what it
takes meanwhile nor what it computes."""

from __future__ import annotations

from typing import Any

import torch

_POLICY, _CHUNK, _ADDED = 9, 8, 10  # places of arguments
_RETAIN = 11  # an argument that says nothing of the sums
_PREFIX = "torch_nn._linear_cross_entropy_batch_chunked"
_OF_TOKENS = f"{_PREFIX}_no_reduction."  # losses of single tokens, and no gradients yet


def is_chunked_loss(func: Any) -> bool:
    return func.namespace == "torch_nn" and str(func).startswith((f"{_PREFIX}.", _OF_TOKENS))


def in_chunks(func: Any, args: tuple[Any, ...], cpu: bool) -> Any:
    """What the operation does with these arguments on an accelerator, or on a CPU, where chunks are larger and sums in
    float32."""
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked_accumulator as accumulate

    of_tokens = str(func).startswith(_OF_TOKENS)
    given = [*args[:5], "none", args[5], 0.0, *args[6:], None, False, False, False] if of_tokens else list(args)
    if cpu:
        (tokens, width), classes, dtype = given[0].shape, len(given[1]), given[0].dtype
        options: Any = torch.nn.LinearCrossEntropyOptions()
        found = options._adjust(tokens, width, classes, dtype, torch.device("cpu"))
        given[_CHUNK], given[_POLICY], given[_ADDED] = found.batch_chunk_size, found.acc_policy, found.acc_dtype
    del given[_RETAIN]
    return accumulate(*given)[0] if of_tokens else accumulate(*given)
