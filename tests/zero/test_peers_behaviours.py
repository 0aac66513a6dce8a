"""What the test suites of other engines hold, and ours did not: one case each, against one plain process."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardproof
from distributed.harness import Case, Env, Sharded, listening, parity
from shardproof.errors import EngineError
from zero.models import CLASSES, FEATURES, WIDTH, Block, Net

STAGES = [0, 1, 2, 3]
CASES: dict[str, Case] = {}


def step(name: str, build: Callable[[], Any] = Net, **fields: Any) -> Callable[[Any], Any]:
    """Decorator: the function is the step of case `name`."""

    def add(fn: Any) -> Any:
        CASES[name] = Case(build, fn, **fields)
        return fn

    return add


def mse(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    return loss


def train(name: str, build: Callable[[], Any], **fields: Any) -> None:
    step(name, build, **fields)(lambda env, model, batch: mse(model, batch))


def changed(name: str, build: Callable[[], Any] = Net) -> Callable[[Any], Any]:
    """Decorator: the function changes the model before the second step."""

    def add(change: Callable[[Any], None]) -> Any:
        def run(env: Env, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if env.k == 1:
                change(model)
                assert env.optimizer is not None
                known = {id(p) for group in env.optimizer.param_groups for p in group["params"]}
                new = [p for p in model.parameters() if id(p) not in known]
                env.optimizer.add_param_group({"params": new})
            return mse(model, batch)

        return step(name, build)(run)

    return add


# -- lists of parameters and of modules --------------------------------------------------------------------------------


class Prompts(Net):
    """Forward takes slices and copies of its lists of parameters: those are new lists, of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList([torch.full((CLASSES,), 0.1 * i) for i in range(4)])
        self.named = nn.ParameterDict({"a": torch.ones(CLASSES), "b": torch.ones(CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = sum(self.prompts[1:]) * self.prompts[:1][0]
        return super().forward(x) + some + self.named.copy()["a"] * (self.named | self.named)["b"]


class PromptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList([torch.ones(WIDTH) for _ in range(3)])

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return super().inner(h) + sum(self.prompts[1:]) * h


train("slices_of_lists_of_parameters", Prompts)
train("slices_of_lists_of_parameters_in_a_unit", functools.partial(Net, PromptedBlock))


@changed("a_block_inserted_in_the_middle")
def _(model: Net) -> None:
    model.blocks.insert(1, Block())


@changed("a_block_deleted_and_one_inserted")
def _(model: Net) -> None:
    del model.blocks[1]
    model.blocks.insert(0, Block())


@changed("a_module_inserted_into_a_sequence", lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)))
def _(model: nn.Sequential) -> None:
    model.insert(1, nn.Linear(5, 5))


@step("average_of_a_model_that_is_a_sequence", lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)))
def _(env: Env, model: nn.Sequential, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    average = env.keep.setdefault("average", torch.optim.swa_utils.AveragedModel(model) if env.k == 0 else None)
    average.update_parameters(model)
    with torch.no_grad():
        value = average(batch["x"]).mean()
    return [mse(model, batch), value]


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_of(order: float) -> Callable[..., list[torch.Tensor]]:
    def run(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        loss = mse(model, batch)
        env.engine.before_step({"": model})
        return [loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)]

    return run


for order in (-float("inf"), -1.0, 0.0, 1.0, float("inf")):
    step(f"clipped_by_norm_of_order_{order}")(norm_of(order))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage)


def check(name: str, stage: int) -> None:
    parity(name, CASES[name], Sharded(stage))


class Counting(nn.Linear):
    """Keeps more in a state dict than tensors of its own."""

    def __init__(self, inside: int, outside: int, kind: str) -> None:
        super().__init__(inside, outside)
        self.calls, self.kind = 0, kind

    def get_extra_state(self) -> Any:
        return torch.ones(self.calls) if self.kind == "tensor" else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = len(state) if self.kind == "tensor" else state["calls"]


def carried(stage: int, kind: str, how: str, folder: str) -> int:
    model, other = (nn.Sequential(Counting(3, 3, kind), nn.Linear(3, 3)) for _ in range(2))
    for one in (model, other):
        shardproof.shard(one, stage)
    model[0].calls = 5
    if how == "full_state_dict":
        shardproof.load_full_state_dict(other, shardproof.full_state_dict(model))
    elif how == "state_dict":
        other.load_state_dict(model.state_dict())
    else:
        shardproof.save(model, None, folder).wait()
        shardproof.load(other, None, folder)
    return other[0].calls


@pytest.mark.parametrize("how", ["full_state_dict", "state_dict", "checkpoint"])
@pytest.mark.parametrize("kind", ["dict", "tensor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_modules_add_to_a_state_dict_comes_along(run2, tmp_path, stage, kind, how):
    assert run2(carried, stage, kind, how, str(tmp_path / "saved")) == [5, 5]


def test_it_may_not_be_missing():
    model = shardproof.shard(nn.Sequential(Counting(3, 3, "dict")), 3)
    state = shardproof.full_state_dict(model)
    del state["0._extra_state"]
    with pytest.raises(EngineError, match=r"1 missing: 0\._extra_state"):
        shardproof.load_full_state_dict(model, state)
    shardproof.load_full_state_dict(model, state, strict=False)


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))


def test_statistics_in_another_dtype_than_that_of_computing_are_named():
    with listening() as lines:
        shardproof.shard(with_batch_norm(), 3, mixed_precision=torch.bfloat16)
    assert lines[0].startswith("'1': a BatchNorm whose running statistics are not torch.bfloat16")
    model = with_batch_norm()
    model[1].to(torch.bfloat16)
    with listening() as lines:
        shardproof.shard(model, 3, mixed_precision=torch.bfloat16)
    model(torch.randn(4, FEATURES)).float().sum().backward()
    assert not lines
    assert {value.dtype for name, value in shardproof.full_state_dict(model).items() if "weight" in name} == {
        torch.float32
    }


def state_read_back(folder: str) -> int:
    """Of parameters of which some ranks have no element, and whose state is in files."""
    model = shardproof.shard(nn.Linear(3, 1), 3, offload=f"nvme:{folder}")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    return min(state["exp_avg"].numel() for state in optimizer.state.values())


def test_torch_saves_a_state_in_files_of_which_a_rank_has_nothing(run2, tmp_path):
    assert run2(state_read_back, str(tmp_path)) == [0, 0]


def after_a_copy(stage: int) -> float:
    """Ranks have planned the next step of a copy of a model when that is gone."""
    model: Net | None = copy.deepcopy(shardproof.shard(Net(), stage))
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(2, FEATURES)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model = optimizer = None
        gc.collect()
        model = shardproof.shard(Net(), stage)
    return float(model.head.weight.norm())


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_that_is_gone_was_known_whole(run2, stage):
    first, second = run2(after_a_copy, stage)
    assert first == second
