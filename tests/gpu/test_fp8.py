"""Promise: with `--fp8` an accelerator computes about what it does in bf16. What fails first says where it breaks."""

from __future__ import annotations

import pytest
import torch

import shardproof
from gpu.test_accelerator import KIND, here
from shardproof.errors import ConfigError
from shardproof.integrations.prepared import compile_units
from shardproof.train.model.fp8 import check_fp8
from train.test_fp8 import NEEDS, build
from zero.language_models import texts

pytestmark = pytest.mark.skipif(not KIND, reason="no accelerator")


@pytest.fixture
def device() -> torch.device:
    found = here()
    try:
        check_fp8(found)
    except ConfigError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rows", [16, 18, 160])
def test_a_product_of_torch_is_finite(device, rows, backward):
    torch.manual_seed(0)
    kind = torch.float8_e5m2 if backward else torch.float8_e4m3fn
    a, b = torch.randn(rows, 32, device=device), torch.randn(48, 32, device=device)
    one = torch.ones((), device=device)
    got = torch._scaled_mm(a.to(kind), b.to(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.bfloat16)
    assert (got.float() - a @ b.t()).norm() < 0.2 * (a @ b.t()).norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_losses_and_gradients_are_close_to_those_in_bf16(device, sharded, compiled):
    pytest.importorskip("torchao", reason=NEEDS)
    if compiled and KIND == "cpu":
        pytest.skip("with the kernels of an accelerator")
    found = []
    for eight in (False, True):
        torch._dynamo.reset()
        model = build(False, eight).to(device)
        if sharded:
            shardproof.shard(model, 3, device=device)
        if compiled and sharded:
            compile_units(model)
        elif compiled:
            for block in model.model.layers:
                block.compile()
        batch = {name: value.to(device) for name, value in texts(0, 2).items()}
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        norms = [float(p.grad.norm()) for p in model.parameters()]
        found.append([float(loss.detach()), sum(norms)])
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], rel=0.05)
