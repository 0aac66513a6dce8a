"""Promise: `--optimizer galore` computes what its paper says, at every stage, and checkpoints of it go on elsewhere."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from shardproof.errors import ConfigError
from shardproof.train.optim.galore import GaLore
from shardproof.train.optim.matrices import GaLoreAndAdamW
from shardproof.train.optim.optimizers import check_arguments
from train import test_muon
from train.test_optimizers import trained
from zero.models import Net

HOW = {"rank": 2, "update_gap": 2, "scale": 0.5}


of_matrices = functools.partial(test_muon.of_matrices, kind=GaLoreAndAdamW, **HOW)


def close(weights: dict[str, Any], got: dict[str, Any]) -> bool:
    return all(torch.allclose(got[name], value, atol=1e-5) for name, value in weights.items())


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one_process(run2, stage):
    weights, begun = trained(0, of_matrices), trained(0, of_matrices, steps=0)
    assert not any(torch.allclose(begun[name], value, atol=1e-3) for name, value in weights.items())
    assert all(close(weights, got) for got in run2(trained, stage, of_matrices))


@pytest.mark.parametrize(("there", "here"), [(3, 1), (0, 3)])
def test_a_checkpoint_goes_on_elsewhere(run2, tmp_path, there, here):
    folder = str(tmp_path / "checkpoint-3")  # the directions of the third step are for the fourth, too
    weights = trained(0, of_matrices)
    run2(trained, there, of_matrices, steps=3, save=folder)
    assert close(weights, trained(0, of_matrices, load=folder))
    assert all(close(weights, got) for got in run2(trained, here, of_matrices, load=folder))


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5), (6, 1)])
def test_the_numbers_are_those_of_the_paper(shape):
    """Written down again in fp64, with projections on the side that the paper names."""
    lr, decay, beta1, beta2, eps, rank, gap, scale = 0.1, 0.01, 0.8, 0.9, 1e-6, 3, 2, 0.25
    generator = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    weight = p.detach().clone()
    optimizer = GaLore(
        [p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, rank=rank, update_gap=gap, scale=scale
    )
    for step in range(5):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        p.grad = gradient.clone()
        optimizer.step()
        left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
        if step % gap == 0:
            side = right[:rank].double() if shape[0] >= shape[1] else left[:, :rank].double()
        small = gradient @ side.T if shape[0] >= shape[1] else side.T @ gradient
        if step == 0:
            mean, square = torch.zeros_like(small), torch.zeros_like(small)
        mean = beta1 * mean + (1 - beta1) * small
        square = beta2 * square + (1 - beta2) * small * small
        moved = (mean / (1 - beta1 ** (step + 1))) / ((square / (1 - beta2 ** (step + 1))).sqrt() + eps)
        whole = moved @ side if shape[0] >= shape[1] else side @ moved
        weight = weight * (1 - lr * decay) - lr * scale * whole
        torch.testing.assert_close(p.detach(), weight, rtol=1e-6, atol=1e-6)


def state_held() -> dict[str, int]:
    torch.manual_seed(0)
    model = shardproof.shard(Net(), 3)
    optimizer = of_matrices(model.parameters())
    model(torch.ones(2, 6, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    return {
        name: sum(value.numel() for key, value in optimizer.state.get(p, {}).items() if key != "step")
        for name, p in model.named_parameters()
    }


def test_its_owner_holds_what_is_said_of_a_matrix(run2):
    both = run2(state_held)
    for name, p in Net().named_parameters():
        if p.dim() == 2:
            few = min(HOW["rank"], *p.shape)
            assert sorted(state[name] for state in both) == [0, few * (2 * max(p.shape) + min(p.shape))], name


def test_numbers_out_of_range_and_vectors_are_refused():
    with pytest.raises(ValueError, match=r"rank and update_gap must be at least 1"):
        GaLore([nn.Parameter(torch.ones(2, 2))], rank=0)
    with pytest.raises(ValueError, match=r"GaLore projects matrices, but a parameter has shape \(3,\)"):
        GaLore([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"GaLore updates matrices, .* elementwise=True"):
        GaLoreAndAdamW([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "galore",
            {"rnak": 8},
            "--optimizer galore has no such argument. Did you mean rank?\nIt takes rank, update_gap",
        ),
        ("galore", {"rank": 0}, "--optimizer-arguments rank=0: GaLore: rank and update_gap must be at least 1"),
        ("galore", {"rank": "many"}, "--optimizer-arguments rank=many: rank should be a whole number."),
        ("galore", {"rank": 2.5}, "--optimizer-arguments rank=2.5: rank should be a whole number."),
        ("galore", {"scale": "nan"}, "--optimizer-arguments scale=nan: scale should be a number."),
        ("muon", {"nesterov": 1}, "--optimizer-arguments nesterov=1: nesterov should be true or false."),
        ("galore", {"lr": 1}, "--optimizer galore has no such argument"),
        ("muon", {"nesterow": False}, "Did you mean nesterov?\nIt takes momentum, nesterov, ns_steps."),
        ("adafactor", {"rank": 8}, "It takes clip_threshold, decay_rate, beta1, scale_parameter."),
        ("adamw", {"rank": 8}, "does not apply to adamw, which is set by --adam-beta1"),
        ("adamw_8bit", {"rank": 8}, "does not apply to adamw_8bit"),
    ],
)
def test_arguments_that_an_optimizer_does_not_take_are_refused(name, given, words):
    config = SimpleNamespace(optimizer=name, optimizer_arguments=given, external_plugins=[])
    with pytest.raises(ConfigError) as refused:
        check_arguments(config)
    assert words in str(refused.value)


def test_arguments_that_an_optimizer_takes_reach_it(tmp_path):
    from shardproof.train.optim.optimizers import optimizer_of
    from shardproof.train.options.config import SftConfig

    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import torch, shardproof\n"
        '@shardproof.register_optimizer("mine")\n'
        "def mine(groups, lr, momentum=0.0):\n"
        "    return torch.optim.SGD(groups, lr=lr, momentum=momentum)\n"
    )
    params = [nn.Parameter(torch.ones(4, 4))]
    for name, given in (("mine", {"momentum": 0.5}), ("galore", {"rank": 3}), ("muon", {"momentum": 0.5})):
        how = {"optimizer": name, "optimizer_arguments": given, "external_plugins": [str(plugin)]}
        config = SftConfig(model="m", dataset=["d"], **how)
        check_arguments(config)
        make: Any = optimizer_of(config)
        model = nn.Linear(4, 4, bias=False)
        more = {} if name == "mine" else {"model": model}
        optimizer = make(params if name == "mine" else list(model.parameters()), lr=0.1, **more)
        assert given.items() <= optimizer.param_groups[0].items()
    config = SftConfig(model="m", dataset=["d"], **{**how, "optimizer": "mine", "optimizer_arguments": {"momentun": 1}})
    with pytest.raises(ConfigError, match=r"Did you mean momentum\?\nIt takes momentum\."):
        check_arguments(config)
