"""Promise: ranks may take any path, in any order and number; nothing hangs and the result is that of one process."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardproof

STEPS = 6


class Block(nn.Module):
    def __init__(self, width: int, checkpointing: str) -> None:
        super().__init__()
        self.linear, self.norm, self.checkpointing = nn.Linear(width, width), nn.LayerNorm(width), checkpointing

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self.checkpointing == "reentrant")


class Omni(nn.Module):
    """Text blocks, a vision tower for some batches, one expert of several, blocks used a changing number of times."""

    def __init__(self, width: int = 8, checkpointing: str = "none") -> None:
        super().__init__()

        def blocks(count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(width, checkpointing) for _ in range(count))

        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.visual, self.layers, self.experts = blocks(2), blocks(3), blocks(4)

    def forward(self, tokens, image, expert, rounds, order):
        x = self.embed(tokens)
        if image is not None:
            for block in self.visual:
                image = block(image)
            x = x + image
        for _ in range(rounds):
            for index in order:
                x = self.layers[index](x)
        return self.head(x if expert is None else self.experts[expert](x))


def loss_of(model: nn.Module, step: int, number: int) -> torch.Tensor:
    """The loss of micro-batch `number` of `step`: its path depends on both."""
    draw = torch.Generator().manual_seed(100 * step + number)
    tokens, targets = torch.randint(0, 16, (2, 2, 5), generator=draw)
    # An image needs a gradient for reentrant checkpointing to reach the tower's parameters.
    image = torch.randn(2, 5, 8, generator=draw).requires_grad_() if (step + number) % 2 == 0 else None
    expert = [None, 0, 1, 2, 3][(step * 3 + number) % 5]
    order = torch.randperm(3, generator=draw).tolist()[: 2 + number % 2]
    logits = model(tokens, image, expert, 1 + (step + 2 * number) % 2, order)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: nn.Module, ranks: list[int], scale: float) -> list[float]:
    """Train with the micro-batches of `ranks`: a different number each, none at all on rank 0 in step 4."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        for rank in ranks:
            for k in range((0 if rank == 0 else 1) if step == 4 else 1 + (step + rank) % 3):
                (loss_of(model, step, rank + 10 * k) * scale).backward()
                if (step + rank + k) % 4 == 0:  # one rank evaluates in between
                    with torch.no_grad():
                        loss_of(model, step, rank)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_any_path(stage: int, checkpointing: str, dynamic: str) -> None:
    torch.manual_seed(0)
    reference = Omni(checkpointing=checkpointing)
    model = shardproof.shard(copy.deepcopy(reference), stage, dynamic=dynamic)
    world = dist.get_world_size()
    expected = train(reference, list(range(world)), 1.0 / world)
    norms = train(model, [dist.get_rank()], 1.0)
    assert norms == pytest.approx(expected, abs=1e-5)
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_two_ranks_on_different_paths_equal_one_process(run2, stage, checkpointing):
    run2(check_any_path, stage, checkpointing, "auto")


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 3])
def test_four_ranks_on_different_paths_equal_one_process(run4, stage):
    run4(check_any_path, stage, "none", "all")


REFUSAL = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist, shardproof
from zero.test_dynamic import Omni, train
torch.manual_seed(0)
model = shardproof.shard(Omni(), 3, dynamic="never")
try:
    train(model, [dist.get_rank()], 1.0)
except shardproof.ShardproofError as error:
    print(f"rank {{dist.get_rank()}} says: {{type(error).__name__}} {{error}}", flush=True)
"""


@pytest.mark.slow
def test_never_raises_at_once_and_names_what_each_rank_wants(tmp_path):
    """In processes of its own: a refused run leaves ranks that do not agree."""
    script = tmp_path / "refusal.py"
    script.write_text(REFUSAL.format(tests=str(Path(__file__).parents[1])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    for rank in range(2):
        assert f"rank {rank} says: DesyncError" in output
    assert "rank 0 wants to gather 'visual.0'" in output
    assert "rank 1 wants to gather 'layers." in output


def check_two_models(stage: int) -> None:
    """Engines of one group take turns: rank 0 uses both models, rank 1 the second only."""
    torch.manual_seed(0)
    pair = [Omni(), Omni()]
    models = [shardproof.shard(copy.deepcopy(m), stage) for m in pair]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    references = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        for r in range(world):
            for i in range(2):
                if r == 0 or i == 1:
                    (loss_of(pair[i], step, r) / world).backward()
                    if r == rank:
                        loss_of(models[i], step, r).backward()
        for optimizer in [*optimizers, *references]:
            optimizer.step()
            optimizer.zero_grad()
    for model, plain in zip(models, pair, strict=True):
        for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_models_that_only_some_ranks_use_take_turns(run2, stage):
    run2(check_two_models, stage)


class Adapted(Block):
    """As PEFT adapts experts: something is attached for as long as it runs."""

    def __init__(self) -> None:
        super().__init__(8, "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.for_now = nn.Identity()
        try:
            return super().forward(x)
        finally:
            del self.linear.for_now


class Deep(nn.Module):
    """As many blocks as it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for block in self.blocks[:depth]:
            x = block(x)
        return x


def check_attached_on_some_ranks(stage: int) -> None:
    torch.manual_seed(0)
    model = Deep()
    reference = copy.deepcopy(model)
    model = shardproof.shard(model, stage)
    world = dist.get_world_size()
    for trained, ranks in ((reference, range(world)), (model, [dist.get_rank()])):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(3):
            for rank in ranks:
                h = trained(torch.full((2, 8), 0.1 * (1 + step)), 1 + 2 * rank)
                (h.square().sum() / (world if trained is reference else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_attached_for_a_forward_need_not_be_so_on_all_ranks(run2, stage):
    run2(check_attached_on_some_ranks, stage)


def made_where_others_were(stage: int) -> None:
    """One rank makes modules of its own right where some of the model's have been: Python gives their places away."""
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Dropout()))
    model = shardproof.shard(nn.Sequential(*layers), stage)
    places = [i for i, layer in enumerate(model) if isinstance(layer, nn.Dropout)]
    for i in places:
        model[i] = nn.Identity()
    others = [nn.Linear(2, 2) for _ in range(4 * dist.get_rank())]
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(isinstance(p, type(model[0].weight)) for other in others for p in other.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_may_make_modules_where_some_of_the_model_have_been(run2, stage):
    run2(made_where_others_were, stage)


class Meets(torch.autograd.Function):
    """The sum over the ranks of a group, as those that share rows meet, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        time.sleep(0.005 * (dist.get_rank() % 2))
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Meets.apply(grad, ctx.group), None


class Shared(Omni):
    """Layers whose inputs are sums of parts that the ranks of a group hold."""

    def forward(self, parts, image, expert, rounds, add):
        parts = [self.embed(part) for part in parts]
        if image is not None:
            for block in self.visual:
                image = block(image)
            parts = [part + image for part in parts]
        for _ in range(rounds):
            for layer in self.layers:
                whole = add(parts)
                parts = [self.experts[expert](layer(part + torch.tanh(whole))) for part in parts]
        return sum(self.head(part).square().mean() for part in parts)


def shared_step(model: nn.Module, step: int, group: int, mine: list[int], add: Callable[..., Any]) -> None:
    """The micro-batches of a group: one more in some steps than in others, with an image or without."""
    for number in range(1 + (step + group) % 2):
        draw = torch.Generator().manual_seed(100 * step + 10 * group + number)
        parts = torch.randint(0, 16, (2, 2, 5), generator=draw)
        image = torch.randn(2, 5, 8, generator=draw).requires_grad_() if (step + group + number) % 2 else None
        expert = int(torch.randint(0, 4, (), generator=draw))
        model([parts[i] for i in mine], image, expert, 1 + group, add).backward()


def check_shared_rows(stage: int, checkpointing: str) -> None:
    torch.manual_seed(0)
    reference = Shared(checkpointing=checkpointing)
    model = shardproof.shard(copy.deepcopy(reference), stage)
    group, me = divmod(dist.get_rank(), 2)
    near = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "parts")).get_group("parts")
    for trained in (reference, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2)
        for step in range(STEPS):
            if trained is model:
                shared_step(model, step, group, [me], lambda parts: Meets.apply(parts[0], near))
            else:
                for each in range(2):
                    shared_step(reference, step, each, [0, 1], sum)
                for parameter in reference.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= 4
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "reentrant"])
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_groups_whose_ranks_meet_by_themselves_may_take_any_path(run4, stage, checkpointing):
    """In collectives of their own, in the middle of passes: ranks of one group do the same, groups what they like."""
    run4(check_shared_rows, stage, checkpointing)
