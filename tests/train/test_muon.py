"""Promise: `--optimizer muon`, `galore` and `adafactor` train at every stage as in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from shardproof.errors import ConfigError
from shardproof.train.optim.matrices import MatricesAndAdamW, MuonAndAdamW, matrices, muon
from shardproof.train.optim.optimizers import made_by
from train.test_optimizers import trained
from train.test_shortcuts import qwen
from zero.models import Net


def of_matrices(params: Any, kind: type[MatricesAndAdamW] = MuonAndAdamW, **how: Any) -> MatricesAndAdamW:
    """Each matrix by Muon, or by what `kind` has for matrices."""
    params = list(params)
    whole = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return kind([{"params": whole}, {"params": rest, "elementwise": True}], lr=0.02, weight_decay=0.1, **how)


def close(weights: dict[str, Any], got: dict[str, Any]) -> bool:
    """Orthogonalising in bfloat16 turns a last bit into more than one."""
    return all(torch.allclose(got[name], value, atol=2e-3) for name, value in weights.items())


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one_process(run2, stage):
    weights, begun = trained(0, of_matrices), trained(0, of_matrices, steps=0)
    assert not any(torch.allclose(begun[name], value, atol=4e-3) for name, value in weights.items())
    assert all(close(weights, got) for got in run2(trained, stage, of_matrices))


@pytest.mark.parametrize(("there", "here"), [(3, 1), (0, 3)])
def test_a_checkpoint_goes_on_elsewhere(run2, tmp_path, there, here):
    folder = str(tmp_path / "checkpoint-2")
    weights = trained(0, of_matrices)
    run2(trained, there, of_matrices, steps=2, save=folder)
    assert close(weights, trained(0, of_matrices, load=folder))
    assert all(close(weights, got) for got in run2(trained, here, of_matrices, load=folder))
    again = str(tmp_path / "checkpoint-3")
    trained(0, of_matrices, load=folder, steps=3, save=again)
    assert all(close(weights, got) for got in run2(trained, here, of_matrices, load=again))


def state_held() -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    model = shardproof.shard(Net(), 3)
    optimizer = of_matrices(model.parameters())
    device = next(model.parameters()).device
    for _ in range(2):
        model(torch.ones(2, 6, device=device)).sum().backward()
        optimizer.step()
    return {
        name: {key: value.numel() for key, value in optimizer.state.get(p, {}).items() if key != "step"}
        for name, p in model.named_parameters()
    }


def test_matrices_are_owned_and_the_rest_is_dealt_out_in_slices(run2):
    both = run2(state_held)
    for name, p in Net().named_parameters():
        held = [state[name] for state in both]
        if p.dim() == 2:
            assert sorted(sum(state.values()) for state in held) == [0, p.numel()], name
        else:
            assert sum(state.get("exp_avg", 0) for state in held) == p.numel(), name


def test_what_a_matrix_is():
    model = qwen()
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for p in matrices(model)}
    assert found == {name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2}
    assert found
    one_row = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Conv1d(2, 2, 2))
    assert matrices(one_row) == [one_row[1].weight]


def test_groups_are_told_apart_by_the_model():
    model = qwen()
    optimizer = made_by(functools.partial(muon, betas=(0.8, 0.9)), [{"params": list(model.parameters())}], 0.1, model)
    whole, rest = optimizer.param_groups
    assert {id(p) for p in whole["params"]} == {id(p) for p in matrices(model)}
    assert len(whole["params"]) + len(rest["params"]) == len(list(model.parameters()))
    assert (whole["elementwise"], rest["elementwise"], rest["betas"]) == (False, True, (0.8, 0.9))
    assert whole["lr"] == rest["lr"] == 0.1


def test_a_model_without_matrices_is_adamws():
    p = nn.Parameter(torch.ones(4))
    optimizer = MuonAndAdamW([{"params": [p], "elementwise": True}], lr=0.1)
    twin = nn.Parameter(torch.ones(4))
    plain = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for value, steps in ((p, optimizer), (twin, plain)):
            value.grad = torch.full((4,), 0.5)
            steps.step()
    assert torch.equal(p, twin)


def test_a_group_that_joins_is_trained_and_a_vector_among_matrices_is_refused():
    params = [nn.Parameter(torch.ones(shape)) for shape in [(3, 4), (3,), (4, 3), (2,)]]
    optimizer = MuonAndAdamW(params[:1], lr=0.1, betas=(0.5, 0.6))
    optimizer.add_param_group({"params": params[1], "elementwise": 1})
    optimizer.add_param_group({"params": (p for p in params[2:3])})
    with pytest.raises(ValueError, match=r"has shape \(2,\): put it in a group with elementwise=True"):
        optimizer.add_param_group({"params": params[3]})
    optimizer.add_param_group({"params": params[3], "elementwise": True})
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.6)] * 4
    twins = copy.deepcopy((params, optimizer))
    for held, steps in ((params, optimizer), twins):
        for p in held:
            p.grad = torch.ones_like(p)
        steps.step()
        assert all((p != 1).all() for p in held)
    assert all(torch.equal(*pair) for pair in zip(params, twins[0], strict=True))


@pytest.mark.parametrize("params", [list, lambda found: ({"params": found},), iter])
def test_parameters_come_in_any_form(params):
    model = Net()
    found = muon(params(model.parameters()), 0.1, model)
    assert sum(len(group["params"]) for group in found.param_groups) == len(list(model.parameters()))


class Talker(nn.Module):
    """Heads that no method tells, as those of Qwen-Omni's talker."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.codec_head = nn.Linear(4, 8, bias=False)
        self.lm_head = nn.ModuleList([nn.Linear(4, 8, bias=False)])


def test_heads_are_adamws_under_other_names_and_in_wrappers():
    from peft import LoraConfig, get_peft_model

    talker = Talker()
    assert matrices(talker) == [talker.proj.weight]
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    model = get_peft_model(qwen(tie_word_embeddings=False), config)
    names = {id(p): name for name, p in model.named_parameters()}
    trained = {names[id(p)] for p in matrices(model) if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)


def test_nothing_for_muon_is_refused():
    model = qwen()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    with pytest.raises(
        ConfigError, match=r"apart from embeddings and heads, no trained parameter is a matrix. Use adamw"
    ):
        muon(vectors, 0.1, model)


@pytest.mark.slow
def test_as_options_of_a_run(commands, sft):
    def run(name: str, stage: int, nproc: int, *more: str) -> tuple[str, list[str]]:
        again = f"{name} {stage} {nproc}{' resumed' if '--resume' in more else ''}".replace(" ", "-")
        shape = ["--stage", str(stage), "--nproc", str(nproc), "--max-steps", "4"]
        return again, sft(*shape, "--optimizer", name, *more)

    few = ("--optimizer-arguments", "rank=4,update_gap=3")
    done = commands(
        [
            run("muon", 0, 1),
            run("muon", 3, 2, "--save-steps", "2"),
            run("muon", 2, 2, "--save-steps", "2", "--resume", "RUNS/muon-3-2/checkpoint-2"),
            run("adafactor", 0, 1),
            run("adafactor", 3, 2),
            run("galore", 0, 1, *few),
            run("galore", 3, 2, *few, "--save-steps", "2"),
            run("galore", 2, 2, *few, "--save-steps", "2", "--resume", "RUNS/galore-3-2/checkpoint-2"),
        ]
    )
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    losses = {name: run.series("loss") for name, run in done.items()}
    assert losses["muon-3-2"] == pytest.approx(losses["muon-0-1"], abs=2e-3)
    assert losses["muon-2-2-resumed"] == pytest.approx(losses["muon-3-2"][2:], abs=2e-3)
    assert losses["adafactor-3-2"] == pytest.approx(losses["adafactor-0-1"], abs=1e-4)
    assert losses["galore-3-2"] == pytest.approx(losses["galore-0-1"], abs=1e-4)
    assert losses["galore-2-2-resumed"] == pytest.approx(losses["galore-3-2"][2:], abs=1e-4)
    assert losses["muon-0-1"][3] != pytest.approx(losses["adafactor-0-1"][3], abs=1e-3)
    assert losses["galore-0-1"][3] != pytest.approx(losses["adafactor-0-1"][3], abs=1e-3)
