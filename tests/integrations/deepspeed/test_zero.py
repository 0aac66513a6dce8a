"""zero.Init, GatheredParameters and the rest of deepspeed.zero and deepspeed.utils."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
import shardproof.integrations.deepspeed as deepspeed
from integrations.deepspeed.test_engine import batch, begin, net, plain_step, weights, whole_batch
from shardproof.errors import EngineError


def edits(stage: int, modifier: int, bf16: bool) -> None:
    """One rank edits, all go on with its values; what it leaves alone keeps every bit; training goes on as in one
    process."""
    reference = net()
    plain_step(reference, 1.0, rows=[whole_batch(0)])
    engine = begin(stage, bf16={"enabled": bf16})
    engine.backward(engine(*batch(0)))
    engine.step()
    model = engine.module
    kept = {id(p): deepspeed.utils.safe_get_full_fp32_param(p) for p in model.parameters()}
    held = model.head.bias
    with deepspeed.zero.GatheredParameters([model.head.weight, held, held], modifier_rank=modifier):
        assert model.head.bias is held
        assert type(held) is nn.Parameter
        assert held.shape == (3,)
        if dist.get_rank() == modifier:
            held.data[1] = 4.0
            nn.init.constant_(model.head.weight, 0.5)
    with torch.no_grad():
        reference.head.weight.fill_(0.5)
        reference.head.bias[1] = 4.0
    assert held is model.head.bias
    assert type(held) is not nn.Parameter
    for p in model.parameters():
        now = deepspeed.utils.safe_get_full_fp32_param(p)
        if p is model.head.weight:
            assert bool((now == 0.5).all())
        elif p is held:
            assert now[1] == 4.0
            assert torch.equal(now[[0, 2]], kept[id(p)][[0, 2]])
        else:
            assert torch.equal(now, kept[id(p)])
    plain_step(reference, 1.0, rows=[whole_batch(1)])
    engine.backward(engine(*batch(1)))
    engine.step()
    tolerance = 0.05 if bf16 else 1e-6
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        assert torch.allclose(value, reference.state_dict()[name], atol=tolerance), name


@pytest.mark.parametrize(
    ("stage", "modifier", "bf16"), [(0, 0, False), (1, 1, False), (2, 0, True), (3, 0, False), (3, 1, True)]
)
def test_gathered_parameters_are_edited_by_one_rank(run2, stage: int, modifier: int, bf16: bool) -> None:
    run2(edits, stage, modifier, bf16)


def reads(stage: int) -> None:
    """Nothing is to be edited: reading is free, an edit is told, an exception passes."""
    engine = begin(stage)
    expected = {name: value.clone() for name, value in net().named_parameters()}
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        for name, p in engine.module.named_parameters():
            assert type(p) is nn.Parameter
            assert torch.equal(p, expected[name])
        with torch.no_grad():
            x, y = batch()
            assert torch.allclose(engine(x, y), net()(x, y), atol=1e-6)
    bias = engine.module.head.bias
    told = pytest.raises(EngineError, match=r"'head.bias' was edited.*modifier_rank=0")
    with told, deepspeed.zero.GatheredParameters(bias):
        bias.data.zero_()
    told = pytest.raises(EngineError, match=r"'head\.bias' has changed its shape")
    with told, deepspeed.zero.GatheredParameters(bias, modifier_rank=0):
        bias.data = torch.zeros(5)
    held = weakref.ref(bias)  # what torch cannot swap: nothing is left half done
    told = pytest.raises(EngineError, match="a weak reference holds it")
    with told, deepspeed.zero.GatheredParameters(list(engine.parameters())):
        pass
    assert type(engine.module.embed.weight) is not nn.Parameter
    del held
    with pytest.raises(KeyError), deepspeed.zero.GatheredParameters(engine.module.head.bias, modifier_rank=0):
        raise KeyError
    with deepspeed.zero.GatheredParameters(engine.module.head.bias, enabled=False):
        assert type(engine.module.head.bias) is not nn.Parameter
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine.module).items())


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_that_are_only_read(run2, stage: int) -> None:
    run2(reads, stage)


def before_initialize() -> None:
    torch.manual_seed(dist.get_rank())
    with deepspeed.zero.Init(dtype=torch.bfloat16, remote_device="cpu"):
        layer = nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(layer.parameters(), modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.ones_(layer.weight)
    assert bool((layer.weight == 1).all())
    biases = [torch.empty(2) for _ in range(2)]
    dist.all_gather(biases, layer.bias.data)
    assert torch.equal(*biases)


def test_gathered_parameters_before_initialize(run2) -> None:
    """Plain parameters take the values of the modifier, too."""
    run2(before_initialize)


class Borrows(nn.Module):
    """A forward that gathers the weight of another module by hand, as DeepSpeed's documentation does it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        with deepspeed.zero.GatheredParameters(self.first.weight, fwd_module=self):
            x = x @ self.first.weight
        return nn.functional.mse_loss(self.second(x), y)


def by_hand(stage: int) -> None:
    """Gathering inside a forward pass, and loading layer by layer on rank 0."""
    torch.manual_seed(0)
    reference = Borrows()
    torch.manual_seed(0)
    engine = begin(stage, Borrows())
    for number in range(2):
        plain_step(reference, 1.0, rows=[whole_batch(number)])
        engine.backward(engine(*batch(number)))
        engine.step()
    for name, value in weights(engine.module).items():
        assert torch.allclose(value, reference.state_dict()[name], atol=1e-6), name

    other = {name: torch.full_like(value, number) for number, (name, value) in enumerate(weights(reference).items())}

    def load(module: nn.Module, prefix: str = "") -> None:
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                module._load_from_state_dict(other, prefix, {}, True, [], [], [])
        for name, child in module.named_children():
            load(child, f"{prefix}{name}.")

    load(engine.module)
    assert all(torch.equal(value, other[name]) for name, value in weights(engine.module).items())


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_by_hand(run2, stage: int) -> None:
    run2(by_hand, stage)


def state(stage: int) -> None:
    """What AdamW keeps, whole: to read and to write."""
    utils, reference = deepspeed.utils, net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    x, y = whole_batch()
    reference(x, y).backward()
    optimizer.step()
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = begin(stage, bf16={"enabled": False}, gradient_clipping=0.0, optimizer=adam)
    weight = engine.module.head.weight
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    with pytest.raises(EngineError, match="after the first step"):
        utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    engine.backward(engine(*batch()))
    engine.step()
    for (name, p), other in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            whole = utils.safe_get_full_optimizer_state(p, key)
            assert torch.allclose(whole, optimizer.state[other][key], atol=1e-6), (name, key)
        assert float(utils.safe_get_full_optimizer_state(p, "step")) == 1.0
    new = torch.arange(float(weight.numel())).view(weight.shape)
    utils.safe_set_full_optimizer_state(weight, new, "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), new)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_optimizer_s_state_is_whole(run2, stage: int) -> None:
    run2(state, stage)


def values() -> None:
    """Whole masters and gradients of single parameters."""
    reference = net()
    x, y = whole_batch()
    reference(x, y).backward()
    engine = begin(3, bf16={"enabled": False})
    deepspeed.zero.register_external_parameter(engine.module, engine.module.head.weight)
    assert deepspeed.utils.set_z3_leaf_modules(engine.module, ["Block"]) == list(engine.module.blocks)
    engine.backward(engine(*batch()))
    for (name, p), other in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(deepspeed.utils.safe_get_full_grad(p), other.grad, atol=1e-6), name
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(p), other)
    bias = engine.module.head.bias
    deepspeed.utils.safe_set_full_grad(bias, torch.arange(3.0))
    assert deepspeed.utils.safe_get_full_grad(bias).tolist() == [0.0, 1.0, 2.0]
    bias.grad = None
    deepspeed.utils.safe_set_full_grad(bias, torch.ones(3))
    assert deepspeed.utils.safe_get_full_grad(bias).tolist() == [1.0, 1.0, 1.0]
    engine.step()
    moved = deepspeed.utils.safe_get_full_fp32_param(bias) - reference.head.bias
    assert torch.allclose(moved, moved[:1])
    assert float(moved.abs().min()) > 0
    deepspeed.utils.safe_set_full_fp32_param(engine.module.head.bias, torch.ones(3))
    assert deepspeed.utils.safe_get_full_fp32_param(engine.module.head.bias).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(EngineError, match="a module and a parameter"):
        deepspeed.zero.register_external_parameter(engine.module, torch.ones(1))


def test_values_of_single_parameters(run2) -> None:
    run2(values)
