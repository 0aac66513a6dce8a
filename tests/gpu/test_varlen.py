"""Promise: on an accelerator `--attn varlen` computes what torch's attention does, by the kernel for many lengths."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from gpu.test_accelerator import KIND, here
from models.test_varlen import BATCHES, KINDS, both
from shardproof.models.attention import padding_free, sinks, varlen

pytestmark = pytest.mark.skipif(not KIND, reason="no accelerator")
NARROW = "values of another width"  # 12 and 6 numbers: there are kernels for multiples of 8


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_sdpa_but_for_rounding(kind, batch):
    torch.manual_seed(1)
    device = here()
    inputs = {name: value.to(device) for name, value in BATCHES[batch]().items()}
    real = inputs.get("attention_mask", torch.ones(2, 12, device=device)).bool()
    exact, ours = both(kind)
    found = []
    where, name = (sinks._OnCuda, "forward") if kind.startswith("sinks") else (varlen, "varlen_attn")
    with mock.patch.object(where, name, autospec=True, side_effect=getattr(where, name)) as kernel:
        for model in (exact.to(device), ours.to(device, torch.bfloat16)):
            logits = model(**inputs, use_cache=False).logits[real].float()
            logits.square().mean().backward()
            grads = [p.grad.float().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
            found.append((logits, torch.cat(grads)))
    assert kernel.called is (KIND == "cuda" and kind != NARROW and batch != "with a gap")
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(("half", "expected"), [(True, "varlen"), (False, "sdpa")])
def test_packed_rows_take_it_where_there_is_a_kernel(half, expected):
    if half and (KIND != "cuda" or torch.get_device_module(KIND).get_device_capability() < (8, 0)):
        pytest.skip("no kernel")
    model = both("fewer heads of keys")[0]
    varlen.take_for_packed(model, half)
    assert model.config._attn_implementation == expected


@pytest.mark.parametrize("kind", ["fewer heads of keys", "a window in all layers"])
def test_batches_without_padding_are_those_with_it_but_for_rounding(kind):
    torch.manual_seed(1)
    device = here()
    exact, ours = both(kind)
    padding_free.make_padding_free(ours.to(device, torch.bfloat16))
    ids = torch.randint(5, 60, (3, 12), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 7:] = mask[2, 2:] = 0
    padding_free.check_padding_free(ours, ids[0])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    found = []
    for model in (exact.to(device), ours):
        logits = model(**inputs, use_cache=False).logits[mask.bool()].float()
        logits.square().mean().backward()
        grads = [p.grad.float().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
        found.append((logits, torch.cat(grads)))
    assert ours.get_decoder().padding_free.used == 2
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() < 0.03 * expected.norm()
