"""torch's loss in chunks, on the meta device: there torch tells the shapes of its results alone, and neither what it
takes meanwhile nor what it computes."""

from __future__ import annotations

from typing import Any

import torch

_POLICY, _CHUNK, _ADDED = 9, 8, 10  # places of arguments
_RETAIN = 11  # an argument that says nothing of the sums


def is_chunked_loss(func: Any) -> bool:
    return func.namespace == "torch_nn" and str(func).startswith("torch_nn._linear_cross_entropy_batch_chunked.")


def in_chunks(args: tuple[Any, ...], cpu: bool) -> Any:
    """What the operation does with these arguments on an accelerator, or on a CPU, where chunks are larger and sums in
    float32."""
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked_accumulator as accumulate

    given = list(args)
    if cpu:
        (tokens, width), classes, dtype = given[0].shape, len(given[1]), given[0].dtype
        options: Any = torch.nn.LinearCrossEntropyOptions()
        found = options._adjust(tokens, width, classes, dtype, torch.device("cpu"))
        given[_CHUNK], given[_POLICY], given[_ADDED] = found.batch_chunk_size, found.acc_policy, found.acc_dtype
    del given[_RETAIN]
    return accumulate(*given)
