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
from torch.nn.utils import prune

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


MENDED = list(CASES)


# -- what held, and had no case --------------------------------------------------------------------------------------


class Recursive(nn.Module):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, depth: int = 2) -> torch.Tensor:
        h = self.linear(h).tanh()
        return self(h, depth - 1) if depth else h


class Nothing(nn.Module):
    """Parameters without elements, one of which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.empty, self.unused = nn.Parameter(torch.empty(0, 4)), nn.Linear(4, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.empty.sum()


def pruned() -> Net:
    model = Net()
    prune.l1_unstructured(model.blocks[0].up, "weight", 0.3)
    return model


train("a_unit_that_calls_itself", functools.partial(Net, Recursive))
train("parameters_without_elements", Nothing)
train("pruned_weights", pruned)


@step("children_of_a_list_that_has_no_forward", lambda: nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)]))
def _(env: Env, model: nn.ModuleList, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(model[1](model[0](batch["x"]).tanh()), batch["y"])
    loss.backward()
    return loss


@step("a_cell_over_time_with_a_state_that_is_cut", lambda: nn.ModuleList([nn.GRUCell(3, 5), nn.Linear(5, CLASSES)]))
def _(env: Env, model: nn.ModuleList, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = env.keep["h"].detach() if env.k else torch.zeros(len(batch["x"]), 5)
    for part in batch["x"].view(-1, 2, 3).unbind(1):
        h = model[0](part, h)
    loss = F.mse_loss(model[1](h), batch["y"])
    loss.backward()
    env.keep["h"] = h
    return loss


@step("gradients_of_two_tasks_are_projected")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out, found = model(batch["x"]), []
    losses = [F.mse_loss(out, batch["y"]), out.square().mean()]
    for loss in losses:
        loss.backward(retain_graph=True)
        env.engine.before_step({"": model})
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    a, b = (torch.cat([g.flatten() for g in grads]) for grads in found)
    both = a - torch.dot(a, b).clamp(max=0) / b.square().sum() * b + b
    sizes = [p.numel() for p in model.parameters()]
    for p, part in zip(model.parameters(), both.split(sizes), strict=True):
        p.grad = part.view_as(p).clone()
    return losses


@step("weights_as_one_vector")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())
    return mse(model, batch)


@step("rows_of_a_gradient_scaled_by_those_of_the_weight")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    env.engine.before_step({"": model})
    for p in (p for p in model.parameters() if p.ndim > 1):
        p.grad.mul_(p.detach().norm(dim=1, keepdim=True) / p.grad.norm(dim=1, keepdim=True).clamp(min=1.0))
    return loss


@step("a_head_in_pieces_before_the_rest")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each piece has a backward pass of its own, then what is before the head has one."""
    hidden, pieces, total = model.encode(batch["x"]), [], torch.zeros(())
    for piece, y in zip(hidden.detach().chunk(2), batch["y"].chunk(2), strict=True):
        piece = piece.clone().requires_grad_()
        loss = F.mse_loss(model.head(piece), y) / 2
        loss.backward()
        pieces.append(piece.grad)
        total = total + loss.detach()
    hidden.backward(torch.cat(pieces))
    return total


class PackedCells(nn.Module):
    """Rows of two lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([2, 1] * (len(x) // 2))
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 2, 3), lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0][:, 0])


def adamw_of_names(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([(str(i), p) for i, p in enumerate(params)], lr=torch.tensor(1e-2), eps=1e-4)


train("packed_rows_through_cells", PackedCells)
train("named_parameters_and_a_rate_in_a_tensor", Net, optimizer=adamw_of_names)


@step("hooks_before_backward_and_behind_it")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 0:
        model.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
        model.blocks[0].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
        model.blocks[1].register_full_backward_hook(lambda module, grads, given: (grads[0] * 1.5,))
    return mse(model, batch)


@step("a_rank_without_rows", clip=None)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first half of the rows on rank 0, and none on rank 1."""
    mine = 0 if env.engine.rank else 4
    loss = F.mse_loss(model(batch["x"][:mine]), batch["y"][:mine], reduction="sum") / 8 * env.engine.world
    loss.backward()
    return loss


@step("a_rank_in_eval_mode")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.train(env.engine.rank == 0)
    return mse(model, batch)


@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", [(name, k) for name in CASES for k in (STAGES if name in MENDED else (1, 3))])
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
