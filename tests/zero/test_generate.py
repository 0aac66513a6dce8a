"""Promise: each rank generates by itself, whatever its prompts and lengths and where it stops; training goes on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardproof
from zero.language_models import VOCABULARY, tiny

# One row of prompts per rank: (tokens of each prompt, most new tokens, the token that ends a text).
ASKED = [((3, 7), 9, None), ((5,), 2, 17), ((2, 2, 6), 14, 40), ((), 0, None)]
AMOUNTS = {"kept": None, "unit by unit": 0}  # inference_memory


def texts(model: torch.nn.Module, rank: int, cache: bool, sample: bool) -> list[list[int]]:
    """What a rank generates: each prompt by itself, then all as one padded batch."""
    lengths, longest, end = ASKED[rank]
    chance = torch.Generator().manual_seed(rank)
    prompts = [torch.randint(1, VOCABULARY, (1, n), generator=chance) for n in lengths]
    options = {
        "use_cache": cache,
        "do_sample": sample,
        "max_new_tokens": longest,
        "eos_token_id": end,
        "pad_token_id": 0,
    }
    torch.manual_seed(rank)
    found = [model.generate(p, attention_mask=torch.ones_like(p), **options).tolist()[0] for p in prompts]
    if prompts:
        width = max(lengths)
        padded = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
        found += model.generate(padded, attention_mask=(padded > 0).long(), **options).tolist()
    return found


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> float:
    """A step on the rows of `ranks`."""
    rows = torch.cat([torch.randint(1, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(r)) for r in ranks])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def alternate(stage: int | None, memory: int | None, cache: bool, world: int) -> list[tuple[list[list[int]], float]]:
    """Texts and loss, twice: of this rank where `stage` is given, else of one process that plays all ranks."""
    torch.manual_seed(0)
    model = tiny("Qwen3")
    alone = stage is None
    ranks = list(range(world)) if alone else [dist.get_rank()]
    if not alone:
        shardproof.shard(model, stage, inference_memory=memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for turn in range(2):
        said = [text for rank in ranks for text in texts(model, rank, cache, sample=turn == 1)]
        found.append((said, step(model, optimizer, ranks)))
    return found


def check(results: list[list[tuple[list[list[int]], float]]], cache: bool, world: int) -> None:
    wanted = alternate(None, None, cache, world)
    for turn, (texts_of_all, loss) in enumerate(wanted):
        assert [text for rank in results for text in rank[turn][0]] == texts_of_all
        assert sum(rank[turn][1] for rank in results) / world == pytest.approx(loss, abs=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(("stage", "memory"), [(1, "kept"), (2, "kept"), (3, "kept"), (3, "unit by unit")])
def test_ranks_generate_to_different_lengths(run2, stage, memory, cache):
    check(run2(alternate, stage, AMOUNTS[memory], cache, 2), cache, 2)


def generate_then_gather(memory: int | None) -> list[int]:
    torch.manual_seed(0)
    model = shardproof.shard(tiny("Qwen3"), 3, inference_memory=memory)
    length = max(len(text) for text in texts(model, dist.get_rank(), cache=True, sample=False))
    shardproof.barrier(model)
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([length]))  # who sits here lends nothing
    return [int(n) for n in lengths]


@pytest.mark.parametrize("memory", AMOUNTS)
def test_a_barrier_before_a_collective_of_ones_own(run2, memory):
    first, second = run2(generate_then_gather, AMOUNTS[memory])
    assert first == second
    assert first[0] != first[1]


def one_evaluates_then_all(stage: int, passes: int) -> list[float]:
    """Behind a barrier all ranks do the same, and come to collectives of their own without another one."""
    model = shardproof.shard(tiny("Qwen3"), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, found = torch.arange(8).view(1, 8), []
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(passes if dist.get_rank() == 0 else 0):
                model(input_ids=ids)
            shardproof.barrier(model)
            for _ in range(2):
                found.append(float(model(input_ids=ids, labels=ids).loss))
                dist.barrier()
    return found


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_behind_a_barrier_ranks_need_the_same(run2, stage, passes):
    first, second = run2(one_evaluates_then_all, stage, passes)
    assert first == second == sorted(first, reverse=True)


@pytest.mark.sampled
@pytest.mark.parametrize("memory", AMOUNTS)
def test_one_of_four_generates_nothing(run4, memory):
    check(run4(alternate, 3, AMOUNTS[memory], True, 4), True, 4)
