"""Promise: to the user's code a sharded parameter and its gradient are whole."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof
from shardproof.errors import EngineError
from zero.models import FEATURES, Net

STAGES = [0, 1, 2, 3]


def pair(stage: int) -> tuple[Net, Net]:
    """The same model plain and sharded, each after one backward over the same rows on every rank."""
    torch.manual_seed(3)
    plain = Net()
    model = shardproof.shard(copy.deepcopy(plain), stage)
    x = torch.randn(4, FEATURES)
    for net in (plain, model):
        net(x).square().mean().backward()
    return plain, model


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def metadata(stage: int) -> None:
    plain, model = pair(stage)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    for (name, p), (same, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == same
        assert isinstance(p, nn.Parameter)
        for a, b in ((p, q), (p.grad, q.grad), (p.data, q.data), (p.detach(), q.detach())):
            assert a.shape == b.shape
            assert a.size() == b.size()
            assert a.size(0) == b.size(0)
            assert (a.numel(), a.dim(), a.ndim, len(a)) == (b.numel(), b.dim(), b.ndim, len(b))
            assert (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride())
            assert a.is_contiguous()
            assert a.is_floating_point()
            assert a.element_size() == b.element_size()
            assert a.requires_grad == b.requires_grad
        assert p.is_leaf
        assert name in repr(p) or "shape" in repr(p)


def values(stage: int) -> None:
    plain, model = pair(stage)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        for a, b in ((p, q), (p.grad, q.grad), (p.data, q.data), (p.detach(), q.detach())):
            for dtype in (None, torch.float32):
                a.norm(dtype=dtype).zero_()  # what is returned is the caller's
                close(a.norm(dtype=dtype), b.norm(dtype=dtype))
            close(a.norm(1), b.norm(1))
            close(a.norm(p=float("inf")), b.norm(p=float("inf")))
            close(torch.linalg.vector_norm(a, 3), torch.linalg.vector_norm(b, 3))
            for order in (0, -1, float("-inf")):
                close(torch.linalg.vector_norm(a, order), torch.linalg.vector_norm(b, order))
            close(torch.linalg.norm(a, 1), torch.linalg.norm(b, 1))  # of a matrix another than of its elements
            close(a.norm(dim=0), b.norm(dim=0))
            close(torch.linalg.vector_norm(a, 2, None, True), torch.linalg.vector_norm(b, 2, None, True))
            close(a.sum(), b.sum())
            close(a.abs().max(), b.abs().max())
            close(a * 1, b)
            close(a + b, b + b)
            close(a[0], b[0])
            close(a.flatten()[-2:], b.flatten()[-2:])
            close(torch.cat([a.reshape(-1), b.reshape(-1)]), torch.cat([b.reshape(-1)] * 2))
            assert torch.allclose(a, b, atol=1e-6)
            assert bool(a.isfinite().all())
            assert a.tolist() == pytest.approx(b.tolist()) if a.dim() == 1 else True
            close(a.clone(), b.clone())
            close(a.double(), b.double())
            assert f"{a.mean():.3f}" == f"{b.mean():.3f}"
        close(torch.from_numpy(p.detach().cpu().numpy()), q.detach())
        close(next(iter(p)), q[0])
        close(torch.stack([p, q]).mean(0), q)


def global_norms(stage: int) -> None:
    plain, model = pair(stage)
    backwards = -1 if dist.is_initialized() and dist.get_rank() == 1 else 1  # as where parameters come from a set
    each = torch._foreach_norm([p.grad for p in model.parameters()][::backwards])
    for got, p in zip(each[::backwards], plain.parameters(), strict=True):
        close(got, p.grad.norm())
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    close(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), expected)
    close(shardproof.clip_grad_norm_(model, float("inf")), expected)
    twin = copy.deepcopy(model)
    close(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), expected)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad * 1, q.grad)
    assert twin is not model
    beside = [nn.Parameter(torch.ones(3)) for _ in range(2)]  # not sharded, and clipped with the rest
    for p in beside:
        p.grad = torch.full((3,), 0.5)
    norms = [
        torch.nn.utils.clip_grad_norm_([*m.parameters(), p], 0.005) for m, p in zip((plain, model), beside, strict=True)
    ]
    close(norms[1], norms[0])
    for p, q in zip([*model.parameters(), beside[1]], [*plain.parameters(), beside[0]], strict=True):
        close(p.grad * 1, q.grad)
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    close(vector, torch.nn.utils.parameters_to_vector(plain.parameters()))
    torch.nn.utils.vector_to_parameters(vector.detach() * 2, model.parameters())
    close(torch.nn.utils.parameters_to_vector(model.parameters()), vector * 2)


def clipped(stage: int) -> None:
    """Ours clips as torch does: of every order, by one or several dtypes, with parameters that are not sharded."""
    for dtypes in ([torch.float32] * 2, [torch.bfloat16] * 2, [torch.float32, torch.bfloat16]):
        torch.manual_seed(3)
        plain = nn.Sequential(*(nn.Linear(FEATURES, FEATURES).to(dtype) for dtype in dtypes))
        model = shardproof.shard(copy.deepcopy(plain), stage)
        tolerance = 1e-2 if torch.bfloat16 in dtypes else 1e-6
        for order in (1.0, 2.0, float("inf")):
            for limit in (0.01, 1e9):
                beside = [nn.Parameter(torch.ones(3)) for _ in range(2)]
                found = []
                for net, other, clip in (
                    (plain, beside[0], torch.nn.utils.clip_grad_norm_),
                    (model, beside[1], shardproof.clip_grad_norm_),
                ):
                    net.zero_grad()
                    sum((p.float() * (p.detach().float() + 1)).sum() for p in net.parameters()).backward()
                    params = list(net.parameters())
                    if order == 1.0:
                        other.grad = torch.full((3,), 0.5)
                        params.append(other)
                    found.append([clip(params, limit, order), *(p.grad * 1 for p in params)])
                for theirs, ours in zip(*found, strict=True):
                    assert ours.dtype == theirs.dtype
                    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)


def saving(stage: int) -> None:
    plain, model = pair(stage)
    expected = plain.state_dict()
    got = model.state_dict()
    assert list(got) == list(expected)
    for name, value in got.items():
        assert type(value) is torch.Tensor
        assert not value.requires_grad
        close(value, expected[name])
    file = io.BytesIO()
    torch.save(got, file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    close(pickle.loads(pickle.dumps(model.head.weight)), plain.head.weight)
    with torch.no_grad():
        other = Net()
        torch.manual_seed(9)
        for p in other.parameters():
            p.normal_()
    model.load_state_dict(other.state_dict())
    for name, value in model.state_dict().items():
        close(value, other.state_dict()[name])


def full_state(stage: int) -> list[str]:
    plain, model = pair(stage)
    rank = dist.get_rank() if dist.is_initialized() else 0
    full = shardproof.full_state_dict(model)
    if rank:
        assert full == {}
    else:
        assert list(full) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(full[name], value)
            assert full[name].untyped_storage().nbytes() == value.untyped_storage().nbytes()
    torch.manual_seed(20 + rank)  # other ranks' values must not count
    other = Net().state_dict()
    shardproof.load_full_state_dict(model, other if rank == 0 else {})
    torch.manual_seed(20)
    expected = Net().state_dict()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, expected[name])
    errors = []
    for wrong in (
        {**other, "head.bias": torch.zeros(4)},
        {"head.bias": other["head.bias"]},
        {**other, "x": torch.ones(1)},
    ):
        with pytest.raises(shardproof.ShardproofError) as caught:
            shardproof.load_full_state_dict(model, wrong)
        errors.append(str(caught.value))
    return errors


def ranks_start_equal(stage: int) -> None:
    """A model seeded differently on every rank is rank 0's everywhere after `shard`."""
    torch.manual_seed(40 + dist.get_rank())
    model = shardproof.shard(Net(), stage)
    torch.manual_seed(40)
    for name, value in Net().state_dict().items():
        assert torch.equal(shardproof.full_state_dict(model, rank0_only=False)[name], value)


def state_is_a_copy(stage: int) -> None:
    """What was collected stays what it was: buffers too, of which a forward moves some in place."""
    model = shardproof.shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), stage)
    full = shardproof.full_state_dict(model, rank0_only=False)
    model(torch.ones(4, 2))
    assert full["1.running_mean"].tolist() == [0, 0]
    assert int(full["1.num_batches_tracked"]) == 0


def whole(stage: int) -> str:
    plain, model = pair(stage)
    for p in (*plain.parameters(), *model.parameters()):
        p.grad = None
    x = torch.ones(2, FEATURES)
    with shardproof.whole(model) as same:
        assert same is model
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(p) is nn.Parameter
            assert torch.equal(p, q)
            assert p.requires_grad == q.requires_grad
            assert p.untyped_storage().nbytes() >= p.numel() * 4
        with torch.no_grad():
            for p, q in zip(model.blocks[1].parameters(), plain.blocks[1].parameters(), strict=True):
                assert p.data_ptr() != q.data_ptr()
            assert torch.equal(model(x), plain(x))
    with shardproof.whole(model, writeback=True), torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
        model.head.weight = nn.Parameter(torch.ones(3, 5))
        model.embed.bias.data = torch.arange(5.0)
    with torch.no_grad():
        plain.blocks[0].up.weight.mul_(2)
        plain.head.weight.fill_(1)
        plain.embed.bias.copy_(torch.arange(5.0))
    close(model(x), plain(x))
    with pytest.raises(shardproof.ShardproofError) as caught, shardproof.whole(model), torch.no_grad():
        model.blocks[2].down.weight.zero_()
    close(model(x), plain(x))  # the edit is dropped
    with pytest.raises(ZeroDivisionError), shardproof.whole(model):
        raise ZeroDivisionError
    close(model(x), plain(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for net, opt in ((model, optimizer), (plain, other)):
        net(x).square().mean().backward()
        opt.step()
    close(model(x), plain(x))
    with shardproof.whole(model, writeback=True):
        model.head.weight.data, model.head.bias.data = torch.full((4, 5), 2.0), torch.full((4,), torch.nan)
    with shardproof.whole(model):  # not a number is no edit
        close(model.head.weight.data, torch.full((4, 5), 2.0))
    assert model(x).shape == (2, 4)
    return str(caught.value)


def surgery(stage: int) -> None:
    """A bigger vocabulary and a replaced layer: shapes change inside `whole(writeback=True)`."""
    plain, model = pair(stage)
    with shardproof.whole(model, writeback=True):
        torch.manual_seed(1)
        model.head = nn.Linear(5, 4)
        model.blocks[1].up.weight = nn.Parameter(torch.ones(9, 5))
        model.blocks[1].up.bias = nn.Parameter(torch.ones(9))
        model.blocks[1].down.weight = nn.Parameter(torch.ones(5, 9))
    torch.manual_seed(1)
    plain.head = nn.Linear(5, 4)
    plain.blocks[1].up.weight = nn.Parameter(torch.ones(9, 5))
    plain.blocks[1].up.bias = nn.Parameter(torch.ones(9))
    plain.blocks[1].down.weight = nn.Parameter(torch.ones(5, 9))
    x = torch.ones(2, FEATURES)
    for net in (model, plain):
        for p in net.parameters():
            p.grad = None
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(x).square().mean().backward()
        optimizer.step()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        close(value, plain.state_dict()[name])


def optimizer_made_before(stage: int) -> None:
    torch.manual_seed(3)
    plain = Net()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4) for net in (plain, model)]
    before = [id(p) for p in model.parameters()]
    shardproof.shard(model, stage)
    assert [id(p) for p in model.parameters()] == before
    for k in range(2):
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(k))
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        close(value, plain.state_dict()[name])


def optimizer_state_is_a_shard(stage: int) -> int:
    _, model = pair(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.step()
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1  # and not one more in each step
    assert all(p in optimizer.state for p in model.parameters())
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    return sum(s["exp_avg"].numel() for s in optimizer.state.values())


def arguments_by_name(stage: int) -> None:
    """Operations of which a parameter is a named argument, and layouts that slices do not have."""
    plain, model = pair(stage)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.zeros_like(input=p).shape == q.shape
        close(torch.norm(input=p), torch.norm(q))
        close(torch.linalg.vector_norm(x=p), torch.linalg.vector_norm(q))
        close(torch.linalg.norm(input=p), torch.linalg.norm(q))
    with torch.no_grad():
        for head in (model.head, plain.head):
            head.weight.add_(torch.ones_like(head.weight).to_sparse())
    close(model.head.weight.detach().clone(), plain.head.weight)
    assert model.to(memory_format=torch.channels_last) is model


def each(fn_name: str, stage: int) -> object:
    return globals()[fn_name](stage)


CHECKS = [
    *(
        "metadata",
        "values",
        "global_norms",
        "clipped",
        "saving",
        "full_state",
        "state_is_a_copy",
        "whole",
        "surgery",
        "arguments_by_name",
        "optimizer_made_before",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("check", CHECKS)
def test_one_rank(check, stage):
    each(check, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("check", [*CHECKS, "ranks_start_equal"])
def test_two_ranks(run2, check, stage):
    run2(each, check, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("check", [*CHECKS, "ranks_start_equal"])
def test_four_ranks(run4, check):
    run4(each, check, 3)


def test_misfitting_state_dicts_are_refused_on_all_ranks_with_names(run2):
    for errors in run2(each, "full_state", 3):
        shape, missing, unknown = errors
        assert "head.bias" in shape
        assert "(4,)" in shape
        assert "missing" in missing
        assert "x" in unknown


def test_an_edit_that_would_be_lost_is_an_error_that_names_the_parameter(run2):
    for text in run2(each, "whole", 3):
        assert "blocks.2.down.weight" in text
        assert "writeback=True" in text


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_whole_at_stage_0_and_a_shard_from_stage_1(run2, stage):
    whole = sum(p.numel() for p in Net().parameters())
    held = run2(optimizer_state_is_a_shard, stage)
    if stage == 0:
        assert held == [whole, whole]
    else:
        assert sum(held) == whole
        assert max(held) < 0.75 * whole


def edits_on_one_rank(writeback: bool) -> str:
    model = shardproof.shard(Net(), 3)
    before = shardproof.full_state_dict(model, rank0_only=False)
    text = ""
    try:
        with shardproof.whole(model, writeback=writeback), torch.no_grad():
            if dist.get_rank() == 0:
                model.head.weight[-1] += 1.0  # the slice of the last rank
    except shardproof.EngineError as error:
        text = str(error)
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, before[name])
    return text


@pytest.mark.parametrize("writeback", [False, True])
def test_an_edit_of_whole_values_on_one_rank_is_refused_on_all(run2, writeback):
    for text in run2(edits_on_one_rank, writeback):
        assert text.startswith("'head.weight': edited inside shardproof.whole() on some ranks only")


def copies(stage: int) -> None:
    _, model = pair(stage)
    twin = copy.deepcopy(model)
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_has_no_gradients(run2, stage):
    run2(copies, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.unsqueeze_(0),
        lambda p: p.t_(),
        lambda p: p.resize_(2),
        lambda p: p.as_strided_((2,), (1,)),
        lambda p: torch.add(torch.ones(1), 1, out=p),
        lambda p: p.data.resize_(2),
        lambda p: p.grad.unsqueeze_(0),
    ],
)
def test_another_shape_is_refused_by_name(stage, edit):
    """It was taken for the value, in part or not at all, and nothing was said."""
    model = shardproof.shard(nn.Linear(3, 2), stage)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad(), pytest.raises(EngineError, match=r"'weight'"):
        edit(model.weight)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("stage", [0, 3])
def test_turned_in_place(stage):
    """A square parameter and its gradient, as in plain torch; what .data gives is only a view there."""
    model = shardproof.shard(nn.Linear(2, 2), stage)
    before = model.weight.detach().clone()
    model(torch.tensor([[1.0, 3.0]])).sum().backward()
    with torch.no_grad():
        model.weight.t_()
        model.weight.grad.t_()
    assert torch.equal(model.weight, before.t())
    assert model.weight.grad.tolist() == [[1, 1], [3, 3]]
    with pytest.raises(EngineError, match=r"t_ on the \.data or detach\(\) of 'weight' would change its layout"):
        model.weight.data.t_()


def _twice(model: nn.Module) -> torch.Tensor:
    """A second backward pass, whose gradients are twice those of the first, behind a zero_grad."""
    model.zero_grad()
    (2 * model(torch.ones(1, 3)).sum()).backward()
    return model.weight.grad


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_is_made_once_for_all_steps_unless_somebody_knows_it(stage):
    """To make one costs the host more than to look at it. Who holds one has that of then."""
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).sum().backward()
    held, alone = model.weight.grad, id(model.bias.grad)
    assert (_twice(model).tolist(), held.tolist()) == ([[2] * 3] * 2, [[1] * 3] * 2)
    assert model.weight.grad is not held
    assert id(model.bias.grad) == alone
    held = None
    watched = weakref.ref(model.weight.grad)
    _twice(model)
    assert watched() is None
    model.weight.grad.label = "noted"
    assert not hasattr(_twice(model), "label")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_nobody_holds_keeps_no_memory(stage):
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).sum().backward()
    buffer = weakref.ref(model.weight.grad.buffer)
    model.zero_grad()
    assert buffer() is None


@pytest.mark.parametrize("stage", [0, 3])
def test_who_holds_a_gradient_keeps_it_where_another_one_is_assigned(stage):
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).sum().backward()
    held = model.weight.grad
    model.weight.grad = torch.zeros(2, 3)
    (2 * model(torch.ones(1, 3)).sum()).backward()
    assert (held.tolist(), model.weight.grad.tolist()) == ([[1] * 3] * 2, [[2] * 3] * 2)
    model.weight.grad = model.weight.grad + held.mul_(10)
    assert model.weight.grad.tolist() == [[12] * 3] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_who_holds_a_gradient_sees_what_is_added_though_another_one_was_cleared(stage):
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).sum().backward()
    weight, bias = model.weight.grad, model.bias.grad
    model.bias.grad = None
    model(torch.ones(1, 3)).sum().backward()
    weight.mul_(2)
    assert (weight.tolist(), bias.tolist()) == ([[4] * 3] * 2, [1, 1])
    assert (model.weight.grad.tolist(), model.bias.grad.tolist()) == ([[4] * 3] * 2, [1, 1])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_is_put_back_and_given_to_another_parameter(stage):
    model = shardproof.shard(nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), stage)
    (model[0](torch.ones(1, 3)) + 2 * model[1](torch.ones(1, 3))).sum().backward()
    a, b = (linear.weight for linear in model)
    held = a.grad
    a.grad = None
    a.grad = held
    assert a.grad.tolist() == [[1] * 3] * 2
    a.grad = b.grad
    assert a.grad.tolist() == b.grad.tolist() == [[2] * 3] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_of_a_row_of_a_gradient_comes_before_another_one_is_assigned(stage):
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).sum().backward()
    model.weight.grad.view(-1)[:3].mul_(5)
    model.bias.grad = torch.ones(2)
    assert model.weight.grad.tolist() == [[5] * 3, [1] * 3]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["detach_", "assign", "zero_grad"])
def test_a_gradient_that_is_detached_keeps_no_graph(stage, how):
    model = shardproof.shard(nn.Linear(3, 2), stage)
    model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    constant = model.weight.grad.detach()
    assert (constant.sum().requires_grad, model.weight.grad.sum().requires_grad) == (False, True)
    if how == "zero_grad":
        model.zero_grad(set_to_none=False)
    for p in model.parameters():
        if how == "detach_":
            p.grad.detach_()
        elif how == "assign":
            p.grad = p.grad.detach()
    assert not any(p.grad.sum().requires_grad for p in model.parameters())
    assert not any(flat.grad.requires_grad for flat in model._shardproof.flats)


@pytest.mark.parametrize("detach_", [torch.Tensor.detach_, torch.detach_])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_detached_in_place_is_frozen(stage, detach_):
    """As public averages freeze the copy that they keep, before they edit it."""
    model = shardproof.shard(nn.Linear(3, 2), stage)
    average = copy.deepcopy(model)
    for p in average.parameters():
        assert detach_(p) is p
    average.weight.mul_(0.5).add_(model.weight.data, alpha=0.5)
    (average(torch.ones(1, 3)) + model(torch.ones(1, 3))).sum().backward()
    assert [p.requires_grad for p in average.parameters()] == [False, False]
    assert [p.grad for p in average.parameters()] == [None, None]
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    detach_(model.weight.data)  # and what is taken of a parameter leaves it as it is
    detach_(model.weight.detach())
    assert model.weight.requires_grad


def greatest_with_nan(stage: int) -> list[bool]:
    """Of gradients with NaN in one element, which any rank may hold: what the norms of the greatest element are."""
    model = shardproof.shard(nn.Linear(FEATURES, 2 * FEATURES), stage)
    found = []
    for row in range(0, 2 * FEATURES, 3):
        gradient = torch.ones_like(model.weight)
        gradient[row] = float("nan")
        model.weight.grad = gradient
        found.append(model.weight.grad.norm(float("inf")).isnan().item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")).isnan().item())
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_greatest_of_elements_is_nan_where_one_of_them_is(run4, stage):
    assert all(all(found) for found in run4(greatest_with_nan, stage))


def unscaled(stage: int) -> None:
    plain, model = pair(stage)
    found = []
    for net in (plain, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))  # which makes the scale
        scaled = [p.grad.norm() for p in net.parameters()]
        scaler.unscale_(torch.optim.SGD(net.parameters(), 0.1))
        found.append([*scaled, *(p.grad.norm() for p in net.parameters())])
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_from_before_gradients_are_unscaled_are_not_those_behind(run2, stage):
    run2(unscaled, stage)


def copied_inside_of_whole(stage: int) -> None:
    plain, model = pair(stage)
    with shardproof.whole(model):
        found = copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with pytest.raises(EngineError, match="not sharded"):
        shardproof.stats(found[0])
    for twin in found:
        assert {type(p) for p in twin.parameters()} == {nn.Parameter}
        shardproof.shard(twin, stage)
    rows = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(5))
    mine = rows.chunk(2)[dist.get_rank()]
    for net, x in ((plain, rows), *((twin, mine) for twin in found)):
        net.zero_grad()
        net(x).square().mean().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    for twin in found:
        close(twin.head.weight.detach().clone(), plain.head.weight)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_that_is_made_inside_of_whole_is_no_sharded_model(run2, stage):
    run2(copied_inside_of_whole, stage)


def copied_behind_an_edit(stage: int, precision: torch.dtype | None) -> list[float]:
    found: list[float] = []
    for model in (nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))):
        shardproof.shard(model, stage, mixed_precision=precision)
        next(model.parameters()).data[1].fill_(2)
        found += next(copy.deepcopy(model).parameters())[1].tolist() + next(model.parameters())[1].tolist()
    return found


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_copy_has_what_was_written_through_views_before(run2, stage, precision):
    assert run2(copied_behind_an_edit, stage, precision) == [[2.0] * 12] * 2
