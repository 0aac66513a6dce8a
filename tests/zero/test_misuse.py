"""Promise: what ends badly without a word elsewhere goes on right, or is refused by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardproof
from shardproof.errors import DesyncError, EngineError
from zero.models import FEATURES, Net

STAGES = [0, 1, 2, 3]


class Block(nn.Module):
    stop = False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stop:
            raise KeyboardInterrupt
        return x + self.a(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.first(x)))


def interrupted(stage: int, through_root: bool) -> tuple[list[float], list[float]]:
    """Losses without and with a Ctrl-C in the third forward pass, which is caught and tried again."""
    found = []
    for interrupt in (False, True):
        torch.manual_seed(0)
        model = shardproof.shard(Blocks(), stage)
        forward = model if through_root else model.forward
        x = torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(5):
            if step == 2 and interrupt:
                model.layers[1].stop = True
                with pytest.raises(KeyboardInterrupt):
                    forward(x)
                model.layers[1].stop = False
            loss = forward(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert type(model.layers[1].a.weight).__name__ == "ShardedParameter"
        found.append(losses)
    return found[0], found[1]


@pytest.mark.sampled
@pytest.mark.parametrize("through_root", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_a_forward_pass_that_is_tried_again(run2, stage, through_root):
    for calm, caught in run2(interrupted, stage, through_root):
        assert caught == calm


def edited_on_one(stage: int, how: str) -> str:
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    try:
        for step in range(4):
            if step == 3 and dist.get_rank() == 0:
                if how == "load":
                    model.load_state_dict({"head.weight": torch.ones_like(model.head.weight)}, strict=False)
                else:
                    with torch.no_grad():
                        model.head.weight.mul_(2)  # waits here for the other rank, unless values are whole
            model(torch.ones(2, FEATURES)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except DesyncError as error:
        return str(error)
    except RuntimeError as error:  # what torch makes of any error while it loads: a list of their texts
        return str(error)[str(error).index("'head") :]
    return ""


@pytest.mark.parametrize("how", ["load", "edit"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_on_one_rank_is_refused_at_the_next_step(run2, stage, how):
    for text in run2(edited_on_one, stage, how):
        assert text.startswith("'head.weight': edited or loaded on some ranks only")


def state_of_rank_0(stage: int, fresh: bool) -> str:
    """The optimizer's state as rank 0 has it, loaded by every rank."""
    model = shardproof.shard(nn.Linear(16, 16), stage)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    box = [copy.deepcopy(optimizer.state_dict())]
    own = box[0]
    dist.broadcast_object_list(box)
    if fresh:
        optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(own)
    step()  # one's own is taken
    optimizer.load_state_dict(box[0])
    model(torch.ones(2, 16)).sum().backward()
    shardproof.barrier(model)
    try:
        shardproof.zero.optim.state.check_loaded(optimizer, list(model.parameters()))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_another_rank_is_refused(run2, stage, fresh):
    first, second = run2(state_of_rank_0, stage, fresh)
    assert first == ""
    assert ("slices of rank 0 of 2; these are the slices of rank 1 of 2" in second) == (stage > 0)


def pickled_optimizer(stage: int) -> str:
    model = shardproof.shard(nn.Linear(16, 16), stage)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert len(copied.state) == len(optimizer.state) == 2
    pickle.dumps(optimizer.state_dict())
    gone = weakref.ref(optimizer)
    try:
        torch.save(optimizer, io.BytesIO())
    except EngineError as error:
        told = str(error)
    else:
        told = ""
    del optimizer
    assert gone() is None  # nothing keeps its state
    return told


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_holds_slices_is_not_pickled(run2, stage):
    for told in run2(pickled_optimizer, stage):
        assert ("AdamW cannot be pickled: it holds the state of this rank's slices" in told) == (stage > 0), told


GRADIENT_EDITS = {
    "rows": lambda g: g[:2].zero_(),
    "one row": lambda g: g[0].mul_(3),
    "flattened": lambda g: g.view(-1)[1:3].fill_(1),
    "row by row": lambda g: [row.mul_(i) for i, row in enumerate(g)],
    "transposed": lambda g: g.T[1].zero_(),
    "data": lambda g: g.data[:2].zero_(),
    "two views": lambda g: (lambda a, b: (a.zero_(), b.mul_(2), a.add_(1)))(g[:2], g[1:]),
    "kept and edited again": lambda g: (lambda a: (a.zero_(), g.norm(), a.add_(1), g.mul_(2)))(g[:2]),
    "between two norms": lambda g: (lambda a: (g.norm(), a.zero_(), g.div_(g.norm())))(g[:2]),
    "kept over a change to the same values": lambda g: (lambda a: (g.mul_(1), g[0].zero_(), a))(g[:2]),
}

VALUE_EDITS = {
    "rows of another unit": lambda a, b, c: a.data[:2].copy_(b.data[2:]),
    "one row of another unit": lambda a, b, c: a[0].copy_(b[0]),
    "transposed": lambda a, b, c: a.t().copy_(b),
    "a view kept while others are read": lambda a, b, c: (lambda v: (b.sum(), c.sum(), v.zero_()))(a[0]),
    "there and back": lambda a, b, c: (a[0].add_(b[0]), b[0].add_(a[0])),
}


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def edit(stage: int | None, kind: str, name: str) -> list[torch.Tensor]:
    """The weights after steps with edits; `stage` None is plain torch."""
    torch.manual_seed(0)
    model = Units()
    if stage is not None:
        shardproof.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    a, b, c = (layer[0].weight for layer in model.layers)
    rows: torch.Tensor | None = None
    for _ in range(3):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        if name == "rows that are no gradient any more" and rows is not None:
            rows.zero_()
        rows = a.grad[:2]
        if kind == "gradient":
            GRADIENT_EDITS[name](a.grad)
        optimizer.step()
        if kind == "value":
            with torch.no_grad():
                VALUE_EDITS[name](a, b, c)
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "name"),
    [("gradient", n) for n in GRADIENT_EDITS]
    + [("value", n) for n in VALUE_EDITS]
    + [("neither", "rows that are no gradient any more")],
)
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_through_a_view_counts(run2, stage, kind, name):
    wanted = edit(None, kind, name)
    for found in run2(edit, stage, kind, name):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)


def moving_average(stage: int | None, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Units()
    if stage is not None:
        shardproof.shard(model, stage)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if how == "entries":
                for old, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    old.copy_(0.5 * old + 0.5 * new)
            else:
                for name in model.state_dict():
                    average.state_dict()[name].lerp_(model.state_dict()[name], 0.5)
    return [p.detach().clone() for p in average.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["entries", "one at a time"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_an_entry_of_state_dict_counts(run2, stage, how):
    wanted = moving_average(None, how)
    for found in run2(moving_average, stage, how):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)


def an_entry_edited_twice(stage: int | None) -> list[float]:
    torch.manual_seed(0)
    model = Units()
    if stage is not None:
        shardproof.shard(model, stage)
    entry, found = model.state_dict()["first.weight"], []
    for row in range(2):
        entry[row].fill_(0.3)
        found.append(float(model(torch.ones(2, 4)).sum()))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_entry_of_state_dict_may_be_edited_again(run2, stage):
    for found in run2(an_entry_edited_twice, stage):
        assert found == pytest.approx(an_entry_edited_twice(None))


def edits_that_clash(stage: int, how: str) -> str:
    model = shardproof.shard(Units(), stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    entries = model.state_dict()
    model(torch.ones(2, 4)).pow(2).sum().backward()
    if how == "a step":
        optimizer.step()
    else:
        with shardproof.whole(model, writeback=True), torch.no_grad():
            model.first.weight.add_(1)
    entries["first.weight"].zero_()  # in one process it is the weight; here it is what the weight was
    with pytest.raises(EngineError) as caught:
        model(torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.parametrize("how", ["a step", "an edit inside of whole"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_that_comes_too_late_is_refused_by_name(run2, stage, how):
    for text in run2(edits_that_clash, stage, how):
        assert text.startswith(
            "'first.weight': edited through a view, or an entry of state_dict(), that was taken before"
        )


def edits_in_two_places(stage: int) -> str:
    model = shardproof.shard(Units(), stage)
    with torch.no_grad():
        row = model.first.weight[0]
        model(torch.ones(2, 4))  # at stage 3 the row is one of a buffer that is dropped
    entry = model.state_dict()["first.weight"]
    row.add_(1)
    entry.mul_(2)  # in one process it is the memory of the row
    with pytest.raises(EngineError) as caught:
        model(torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES[1:])  # at stage 0 nothing tells: see the limits
def test_edits_of_one_value_in_two_places_are_refused_by_name(run2, stage):
    for text in run2(edits_in_two_places, stage):
        assert text.startswith("'first.weight'")
        assert "edited through a view, or an entry of state_dict(), that was taken before" in text


def memory_of_what_was_handed_out(stage: int) -> int:
    model = shardproof.shard(Units(), stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        for p in model.parameters():
            p.grad[0].mul_(2)
        model.state_dict()
        optimizer.step()
        optimizer.zero_grad()
    copies = model.__dict__["_shardproof"].copies
    for _ in range(100):
        gc.collect()  # a view in a cycle of Python's goes with the cycle, and one of a thread of gloo's a moment later
        model(torch.ones(2, 4))
        left = torch.tensor(len(copies.values) + len(copies.gradients))
        dist.all_reduce(left)  # each pass gathers at stage 3: all ranks make as many
        if not left:
            break
        time.sleep(0.01)
    return len(copies.values) + len(copies.gradients)


@pytest.mark.parametrize("stage", STAGES)
def test_what_nobody_holds_is_let_go(run2, stage):
    assert run2(memory_of_what_was_handed_out, stage) == [0, 0]


LATER = {
    "edit, then more is added": lambda w, more: (w.grad[:2].zero_(), more()),
    "a view, then more is added, then an edit": lambda w, more: (lambda v: (more(), v.zero_()))(w.grad[:2]),
    "a view, then a scaling, then an edit": lambda w, more: (lambda v: (w.grad.mul_(2), v.add_(1)))(w.grad[:2]),
}


def accumulate(stage: int | None, name: str) -> tuple[str, list[torch.Tensor]]:
    """The refusal, if any, and the weights after one step of two losses."""
    torch.manual_seed(0)
    model = Units()
    if stage is not None:
        shardproof.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = model(torch.ones(2, 4)).pow(2).sum(), model(torch.full((2, 4), 0.3)).sum()
    first.backward()
    try:
        LATER[name](model.layers[0][0].weight, second.backward)
        optimizer.step()
    except EngineError as error:
        return str(error), []
    return "", [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_a_gradient_that_grows_counts_or_is_refused(run2, stage, name):
    _, wanted = accumulate(None, name)
    for text, found in run2(accumulate, stage, name):
        if text:
            assert text.startswith("the gradient of 'layers.0.0.weight': edited through a view")
            assert name.endswith("then an edit")
        for got, want in zip(found, wanted if found else [], strict=True):
            torch.testing.assert_close(got, want)
        assert found or text


def assigned_then_edited(stage: int, steps: str) -> str:
    """A step for each letter: assign (a) gradient, a (v)iew of more or (n)othing, (e)dit what was assigned."""
    model = shardproof.shard(Units(), stage)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.1)
    try:
        for _ in range(2):
            given = torch.autograd.grad(model(torch.ones(2, 4)).sum(), params)
            more = [torch.cat([grad.flatten(), grad.new_zeros(1)]) for grad in given]
            views = [one[:-1].view_as(grad) for one, grad in zip(more, given, strict=True)]
            for letter in steps:
                for p, grad, view, one in zip(params, given, views, more, strict=True):
                    if letter in "avn":
                        p.grad = {"a": grad, "v": view, "n": None}[letter]
                    elif "v" in steps:
                        one[-1] = 1.0
                    else:
                        grad.mul_(0.5)
            optimizer.step()
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_that_was_assigned_to_a_gradient_is_not_edited_afterwards(run2, stage):
    for steps in ("ea", "ane", "ve"):  # what is edited is no gradient any more, or lies beside it
        assert run2(assigned_then_edited, stage, steps) == ["", ""]
    for text in run2(assigned_then_edited, stage, "ae"):
        assert text.startswith("A tensor was assigned to the gradient of 'first.weight' and edited afterwards")


def loading_by_swapping() -> str:
    model = shardproof.shard(Units(), 3)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return ""


def test_parameters_are_not_swapped_for_plain_ones(run2):
    """They would never train again: the optimizer and the engine know those of before."""
    for text in run2(loading_by_swapping):
        assert "set_swap_module_params_on_conversion" in text
        assert "'layers.0.0.weight'" in text


def in_an_order_of_its_own(look: str, stage: int) -> None:
    """As in a loop over a set of parameters, whose order differs between processes: on rank 1 the last one first."""
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")  # what ranks want next is of a group
    model = shardproof.shard(Blocks(), stage, mesh=mesh)
    parameters = list(model.parameters())
    x = torch.randn(8, 4)
    model(x).pow(2).mean().backward()
    told = r"(?s)rank 0 wants to .*'first\..*rank 1 wants to .*'layers\.1\.a\..*that of a set differs"
    with pytest.raises(DesyncError, match=told):
        for p in parameters[:: -1 if dist.get_rank() else 1]:
            if look == "norm":
                p.detach().norm()
            elif look == "gradient":
                p.grad.mean()
            elif look == "draw":
                nn.init.normal_(p)
            else:
                torch.autograd.grad(model(x).sum(), p)


@pytest.mark.parametrize(
    ("look", "stage"), [("norm", 1), ("gradient", 2), ("draw", 0), ("draw", 3), ("autograd.grad", 3)]
)
def test_ranks_that_look_at_parameters_in_another_order_are_told(run2, look, stage):
    run2(in_an_order_of_its_own, look, stage)


@pytest.mark.parametrize("before", [True, False])
def test_what_gradients_are_added_in_is_said_to_shard(before):
    """A dtype of its own that a parameter was given is never forgotten."""
    wide = shardproof.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)
    for precision in (None, wide):
        model = nn.Linear(3, 3).bfloat16()
        refused = pytest.raises(EngineError, match=r"'weight' accumulates gradients in torch.bfloat16")
        with nullcontext() if precision else refused:
            if before:
                model.weight.grad_dtype = torch.float32
            shardproof.shard(model, 3, mixed_precision=precision)
            model.weight.grad_dtype = torch.float32
            model(torch.ones(1, 3).bfloat16()).sum().backward()
            assert model.weight.grad.dtype == torch.float32
