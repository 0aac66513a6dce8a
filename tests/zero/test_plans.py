"""Promise: ranks that do the same in each step need not ask each other, and may still differ at any moment."""

from __future__ import annotations

import copy
import gc
import pathlib
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardproof
from distributed.harness import listening
from zero.test_dynamic import Omni

STAGES = [0, 1, 2, 3]


@dataclass(frozen=True)
class Path:
    """What a rank does in a step."""

    image: bool = False
    expert: int | None = 0
    order: tuple[int, ...] = (0, 1, 2)
    batches: int = 1
    evaluates: bool = False  # before its batches


USUAL = Path()

# (step, rank) -> what is unusual there; every other step of every rank is the same
UNUSUAL = {
    "a_tower_on_one_rank": {(6, 0): Path(image=True)},
    "another_expert_on_one_rank": {(6, 1): Path(expert=3)},
    "no_expert_on_one_rank": {(6, 0): Path(expert=None)},
    "layers_skipped_on_one_rank": {(6, 1): Path(order=(2,)), (10, 0): Path(order=(0, 1))},
    "layers_in_another_order_on_all": {(6, 0): Path(order=(2, 1, 0)), (6, 1): Path(order=(2, 1, 0))},
    "two_orders_at_once": {(6, 0): Path(order=(2, 1, 0)), (6, 1): Path(order=(1, 0, 2))},
    "more_batches_on_one_rank": {(6, 1): Path(batches=3)},
    "no_batch_on_one_rank": {(6, 0): Path(batches=0)},
    "no_batch_anywhere": {(6, 0): Path(batches=0), (6, 1): Path(batches=0)},
    "one_rank_evaluates": {(6, 0): Path(evaluates=True), (10, 1): Path(evaluates=True)},
    "all_ranks_evaluate": {(6, 0): Path(evaluates=True), (6, 1): Path(evaluates=True)},
    "a_new_habit": {(step, rank): Path(image=True) for step in range(6, 13) for rank in (0, 1)},
    "two_habits_that_alternate": {(step, rank): Path(expert=2) for step in range(0, 13, 2) for rank in (0, 1)},
    "ranks_with_habits_of_their_own": {(step, 1): Path(image=True, expert=1) for step in range(13)},
    "one_after_the_other": {(6, 0): Path(image=True), (7, 1): Path(expert=2), (8, 0): Path(batches=0)},
}


def forward(model: nn.Module, path: Path, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 16, (2, 2, 5), generator=draw)
    image = torch.randn(2, 5, 8, generator=draw) if path.image else None
    logits = model(tokens, image, path.expert, 1, list(path.order))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run(model: nn.Module, unusual: dict, ranks: list[int], scale: float, clip: bool, stats: list) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(13):
        for rank in ranks:
            path = unusual.get((step, rank), USUAL)
            if path.evaluates:
                with torch.no_grad():
                    forward(model, replace(path, image=True), 7)
            for k in range(path.batches):
                (forward(model, path, 1000 * step + 10 * rank + k) * scale).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "_shardproof"):
            stats.append(shardproof.stats(model))
    return norms


def check(stage: int, name: str, clip: bool, like_an_accelerator: bool) -> None:
    torch.manual_seed(0)
    reference = Omni()
    model = shardproof.shard(copy.deepcopy(reference), stage)
    model._shardproof.comm.by_hand = not like_an_accelerator
    world = dist.get_world_size()
    unusual = {(step, rank + 2 * i): path for (step, rank), path in UNUSUAL[name].items() for i in range(world // 2)}
    expected = run(reference, unusual, list(range(world)), 1.0 / world, clip, [])
    stats: list[shardproof.Stats] = []
    norms = run(model, unusual, [dist.get_rank()], 1.0, clip, stats)
    assert norms == pytest.approx(expected, abs=1e-5)
    for key, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[key], atol=2e-6, rtol=1e-5, msg=key)
    if all(step >= 6 for step, _ in unusual):  # the step before went by plan: only meetings were announced
        assert stats[5].votes - stats[4].votes <= 2 + clip * (1 + (stage > 0)), [s.votes for s in stats]


SOME_STAGES = [pytest.param(stage, marks=pytest.mark.slow) if stage in (1, 2) else stage for stage in STAGES]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_step_after_usual_ones_equals_one_process(run2, name, stage):
    run2(check, stage, name, stage != 1, False)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", UNUSUAL)
def test_collectives_that_know_no_tags_keep_their_order(run2, name, stage):
    """As with NCCL: what ranks start must be the same operation in the same order."""
    run2(check, stage, name, True, True)


@pytest.mark.parametrize(
    "name",
    [
        "a_tower_on_one_rank",
        pytest.param("two_orders_at_once", marks=pytest.mark.slow),
        pytest.param("no_batch_on_one_rank", marks=pytest.mark.slow),
    ],
)
def test_four_ranks(run4, name):
    run4(check, 3, name, True, False)
    run4(check, 2, name, True, True)


def says(stage: int, name: str) -> list[str]:
    with listening() as lines:
        check(stage, name, True, False)
    return lines


@pytest.mark.sampled
@pytest.mark.parametrize("stage", SOME_STAGES)
def test_who_differs_is_said_once_with_the_names_of_the_units(run2, stage):
    lines = [line for said in run2(says, stage, "a_tower_on_one_rank") for line in said]
    assert lines == ["not every rank uses 'visual.0', 'visual.1': those that do not lend their part"]
    assert run2(says, stage, "all_ranks_evaluate") == run2(says, stage, "a_new_habit") == [[], []]


def alternate(stage: int) -> tuple[int, int]:
    """Two models in turn, as a generator and its critic; then one of them goes, and another comes."""
    torch.manual_seed(0)
    models = [shardproof.shard(Omni(), stage) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(8):
        before = shardproof.stats(models[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            forward(model, USUAL, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    after = shardproof.stats(models[0])
    del model, optimizer, models[1], optimizers[1]
    if dist.get_rank() == 0:
        gc.collect()
    models.append(shardproof.shard(Omni(), stage))
    optimizers.append(torch.optim.SGD(models[1].parameters(), lr=0.1))
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            forward(model, USUAL, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        for p in model.parameters():
            copies = [torch.empty(p.shape) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, p.detach().whole().contiguous())
            assert torch.equal(copies[0], copies[1])
    return after.votes - before.votes, after.votes_apart


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
def test_models_that_take_turns_have_plans_too(run2, stage):
    apart = [votes_apart for _, votes_apart in run2(noop)]
    for (votes, votes_apart), earlier in zip(run2(alternate, stage), apart, strict=True):
        assert votes == 4  # each model: the end of its step, and its update
        assert votes_apart == earlier


def noop() -> tuple[int, int]:
    """What was counted by the tests before."""
    return 0, shardproof.stats(shardproof.shard(nn.Linear(1, 1), 0)).votes_apart


def goes_on_one_rank(stage: int, like_an_accelerator: bool) -> None:
    """A model that one rank forgets while its gradients are still to be reduced, and the other keeps."""
    first = shardproof.shard(Omni(), stage)
    first._shardproof.comm.by_hand = not like_an_accelerator
    forward(first, USUAL, 3).backward()
    kept = first if dist.get_rank() == 0 else None
    del first
    gc.collect()
    check(stage, "a_tower_on_one_rank", True, like_an_accelerator)
    assert kept is not None or dist.get_rank() == 1


@pytest.mark.sampled
@pytest.mark.parametrize("like_an_accelerator", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_gone_on_one_rank_only(run2, stage, like_an_accelerator):
    run2(goes_on_one_rank, stage, like_an_accelerator)


# --- around the step --------------------------------------------------------------------------------


def around(where: str, stage: int, clip: bool, to_none: bool) -> None:
    """One rank does something of its own at one place of the step; the result must be that of one process."""
    torch.manual_seed(0)
    reference = Omni()
    model = shardproof.shard(copy.deepcopy(reference), stage)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]
    rank, world = dist.get_rank(), dist.get_world_size()

    def own(place: str) -> None:
        if where == place and step in (3, 8) and rank == 0:
            with torch.no_grad():
                forward(model, replace(USUAL, image=True), 7)
                model.layers[2].linear.weight.mean()

    for step in range(12):
        missing = where == "no batch" and step in (3, 8)
        for r in range(1 if missing else 0, world):
            (forward(reference, USUAL, 10 * step + r) / world).backward()
        if not (missing and rank == 0):
            forward(model, USUAL, 10 * step + rank).backward()
        if where == "uneven after a look" and step in (3, 8):
            for m in (reference, model):
                assert all(p.grad.norm() >= 0 for p in m.parameters() if p.grad is not None)
            (forward(reference, USUAL, 777) / world).backward()
            if rank == 1:
                forward(model, USUAL, 777).backward()
        if clip:
            for m in (reference, model):
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        own("before the step")
        for optimizer in optimizers:
            optimizer.step()
        own("after the step")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
    for key, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[key], atol=2e-6, rtol=1e-5, msg=key)


@pytest.mark.sampled
@pytest.mark.parametrize("to_none", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["before the step", "after the step", "no batch", "uneven after a look"])
def test_one_rank_on_its_own_around_the_step(run2, where, stage, clip, to_none):
    run2(around, where, stage, clip, to_none)


def clears_alone(stage: int) -> str:
    model = shardproof.shard(Omni(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    forward(model, USUAL, 1).backward()
    if dist.get_rank() == 0:
        optimizer.zero_grad()
        forward(model, USUAL, 1).backward()
    try:
        optimizer.step()
    except shardproof.DesyncError as error:
        return str(error)
    return ""


CLEARS = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from zero.test_plans import clears_alone
dist.init_process_group("gloo")
print(f"rank {{dist.get_rank()}} says: {{clears_alone(3)}}", flush=True)
"""


@pytest.mark.slow
def test_gradients_cleared_on_one_rank_are_refused_before_the_step(tmp_path):
    """In processes of its own: a refused run leaves ranks that do not agree."""
    script = tmp_path / "clears.py"
    script.write_text(CLEARS.format(tests=str(pathlib.Path(__file__).parents[1])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert output.count("cleared its gradients since the last step, and other ranks differ") == 2
