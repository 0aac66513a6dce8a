"""Promise: what cannot work raises one clear error that names the parameter or module and says what to do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof
from shardproof.errors import EngineError, NonFiniteError, StaleWeightsError
from zero.models import FEATURES, Net


@pytest.mark.parametrize("stage", [-1, 4, "3", None, 1.5, 3.0, True])
def test_a_stage_outside_0_to_3(stage):
    with pytest.raises(EngineError, match="stage"):
        shardproof.shard(Net(), stage)


def test_sharding_twice():
    model = shardproof.shard(Net(), 3)
    with pytest.raises(EngineError, match="already"):
        shardproof.shard(model, 3)
    with pytest.raises(EngineError, match=r"blocks|up.weight|already"):
        shardproof.shard(model.blocks[0], 2)
    with pytest.raises(EngineError, match=r"0\..*sharded"):
        shardproof.shard(nn.Sequential(model), 2)


def test_a_buffer_that_is_trained():
    model = Net()
    model.register_buffer("gain", torch.ones(2, requires_grad=True))
    with pytest.raises(EngineError, match=r"The buffer 'gain' requires a gradient.* Make it an nn.Parameter"):
        shardproof.shard(model, 3)


def in_a_wrapper() -> None:
    ddp = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(EngineError, match=r"The model is wrapped in DistributedDataParallel.*shard the module itself"):
        shardproof.shard(ddp, 3)
    with pytest.raises(EngineError, match="'0' is wrapped in DataParallel"):
        shardproof.shard(nn.Sequential(nn.DataParallel(Net())), 0)
    shardproof.shard(ddp.module, 3)


def test_a_model_in_a_wrapper_of_another_strategy(run2):
    run2(in_a_wrapper)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"units": 3}, "units=3 is not a list"),
        ({"units": [3]}, r"units=\[3\] is not a list"),
        ({"mesh": "data"}, "mesh='data' is not a DeviceMesh"),
        ({"device": "nowhere"}, "device='nowhere' is not available"),
        ({"device": "meta"}, "device='meta' is not available"),
        ({"desync_timeout": "soon"}, "desync_timeout='soon' must be a number"),
        ({"desync_timeout": 0}, "desync_timeout=0 must be a number"),
        ({"keep_gathered": 1.5}, "keep_gathered=1.5 must be a number of bytes"),
        ({"dynamic": "sometimes"}, "dynamic='sometimes' is not one of"),
        ({"dynamic": ["visual"]}, "no module of the model is named 'visual'"),
        ({"mixed_precision": torch.int8}, "is not a floating-point dtype"),
    ],
)
def test_an_argument_of_the_wrong_kind(options, text):
    with pytest.raises(shardproof.EngineError, match=text):
        shardproof.shard(Net(), 3, **options)


def test_a_gradient_that_does_not_fit_is_named():
    model = shardproof.shard(Net(), 3)
    with pytest.raises(shardproof.EngineError, match=r"'head.weight' has shape .* gradient of shape \(3,\)"):
        model.head.weight.grad = torch.ones(3)
    with pytest.raises(TypeError, match=r"gradient of 'head.weight' is a tensor or None, not a int"):
        model.head.weight.grad = 3
    with pytest.raises(shardproof.EngineError, match=r"'head.weight' is torch.float32 .* gradient in torch.float64"):
        model.head.weight.grad = torch.ones(model.head.weight.shape, dtype=torch.float64)


def wrapped_again(stage: int) -> str:
    model = shardproof.shard(Net(), stage)
    with pytest.raises(EngineError) as caught:
        nn.parallel.DistributedDataParallel(model)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_wrapper_that_replicates_once_more(run2, stage):
    for text in run2(wrapped_again, stage):
        assert "is not needed around a model that is sharded already" in text


@pytest.mark.parametrize("call", ["stats", "full_state_dict"])
def test_a_model_that_is_not_sharded(call):
    with pytest.raises(EngineError, match="not sharded"):
        getattr(shardproof, call)(Net())


@pytest.mark.parametrize("context", ["no_sync", "whole"])
def test_a_context_of_a_model_that_is_not_sharded(context):
    with pytest.raises(EngineError, match="not sharded"), getattr(shardproof, context)(Net()):
        pass


def test_what_stands_around_a_sharded_model_or_in_it_is_told_which_one_is_sharded(tmp_path):
    """As adapters do that are put around a sharded model, and what is left once they are merged."""
    model = shardproof.shard(Net(), 0)
    around = nn.ModuleDict({"base": model})
    for call in (shardproof.full_state_dict, lambda it: shardproof.save(it, None, tmp_path / "saved")):
        with pytest.raises(EngineError, match="ModuleDict is not sharded, but its 'base' is"):
            call(around)
        with pytest.raises(EngineError, match="ModuleList is a part of a sharded Net: pass that one"):
            call(model.blocks)


def recorded(how: str, stage: int) -> tuple[str, bool]:
    """What is said of recording a sharded model, and whether it computes the same where it was recorded whole."""
    model = shardproof.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), stage)
    x = torch.ones(1, 3)

    def record() -> nn.Module:
        return torch.jit.trace(model, x) if how == "trace" else torch.export.export(model, (x,)).module()

    with pytest.raises(EngineError) as caught:
        record()
    with shardproof.whole(model):
        same = torch.allclose(record()(x), model(x))
    return str(caught.value), same


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_model_is_recorded_whole(run2, how):
    for said, same in run2(recorded, how, 3):
        assert "with shardproof.whole(model):" in said
        assert same


def test_the_dtype_of_a_gradient_is_read_and_not_chosen():
    model = shardproof.shard(Net(), 0)
    assert model.head.weight.grad_dtype is torch.float32
    model.head.weight.grad_dtype = torch.float32
    with pytest.raises(EngineError, match=r"'head.weight' .*float64.* mixed_precision="):
        model.head.weight.grad_dtype = torch.float64


def test_models_that_share_parameters_are_told_to_be_sharded_as_one():
    trunk = nn.Linear(4, 4)
    actor, critic = (nn.Sequential(trunk, nn.Linear(4, n)) for n in (3, 1))
    shardproof.shard(actor, 0)
    with pytest.raises(EngineError, match=r"'0.weight' is sharded already, in a Sequential\..*ModuleList"):
        shardproof.shard(critic, 0)


def test_a_model_that_was_adapted_is_told_to_train_on():
    model = shardproof.shard(nn.Sequential(nn.Linear(4, 4)), 0)
    with pytest.raises(EngineError, match=r"gets adapters later.* trains on without a second call"):
        shardproof.shard(nn.Sequential(model, nn.Linear(4, 3)), 0)


def test_a_parameter_on_the_meta_device_is_named():
    model = Net()
    model.blocks[1].up = nn.Linear(5, 7, device="meta")
    with pytest.raises(EngineError, match=r"blocks\.1\.up\.weight.*meta"):
        shardproof.shard(model, 3)


@pytest.mark.parametrize("where", ["whole", "part", "buffer", "third"])
def test_two_in_one_memory_are_named(where):
    """As one parameter they train one value; apart they would be two, without a word."""
    model = Net()
    value = model.blocks[0].up.weight.data
    if where == "buffer":
        model.register_buffer("mirror", value)
    elif where == "part":
        model.mirror = nn.Parameter(value.view(-1)[3:9])
    else:
        if where == "third":  # lies between them, and is frozen as one of them is
            model.blocks[0].up.weight.requires_grad_(False)
            model.register_buffer("between", value[0])
        model.mirror = nn.Parameter(value)
    with pytest.raises(EngineError, match=r"share memory without being one parameter") as caught:
        shardproof.shard(model, 3)
    assert "mirror" in str(caught.value)
    model.mirror.data = value.clone()  # as it says; nothing was sharded by the refused call
    shardproof.shard(model, 3)


def test_weights_in_codes_are_no_weights_to_mixed_precision():
    """transformers' FP8 layers multiply by scales only where an element takes one byte."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        EngineError, match=r"'0.weight' is torch.float8_e4m3fn: it holds codes .* Load the model unpacked"
    ):
        shardproof.shard(model, 3, mixed_precision=torch.bfloat16)
    shardproof.shard(model, 3)
    assert shardproof.full_state_dict(model)["0.weight"].dtype == torch.float8_e4m3fn


def test_what_shares_memory_and_is_read_only_or_lies_between_is_sharded():
    model = Net()
    model.register_buffer("mirror", model.blocks[0].up.weight.data)
    model.blocks[0].up.weight.requires_grad_(False)
    columns = torch.randn(4, 6)
    model.left, model.right = nn.Parameter(columns[:, :3]), nn.Parameter(columns[:, 3:])
    sharded = shardproof.shard(copy.deepcopy(model), 3)
    for name, value in model.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "text"),
    [(lambda value: value.t(), "a view of itself"), (lambda value: value[:3], r"data of shape \(3, 5\)")],
)
def test_what_forward_may_not_assign_is_named(change, text):
    class Assigning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.square.data = change(self.square.data)
            return super().forward(x)

    model = Assigning()
    model.square = nn.Parameter(torch.randn(5, 5))
    with pytest.raises(EngineError, match=rf"'square' has shape \(5, 5\) and was assigned {text} in forward"):
        shardproof.shard(model, 3)(torch.randn(2, FEATURES))


def test_units_that_match_nothing():
    with pytest.raises(EngineError, match=r"layers\.\*"):
        shardproof.shard(Net(), 3, units=["layers.*"])


def test_nothing_is_sharded_by_a_refused_call():
    model = Net()
    with pytest.raises(EngineError):
        shardproof.shard(model, 3, units=["layers.*"])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    shardproof.shard(model, 3)


def stale(stage: int, kind: str) -> str:
    model = shardproof.shard(Net(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=kind == "fused")
    loss = model(torch.ones(2, FEATURES)).square().mean()
    if kind == "edit":
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
    else:
        model(torch.ones(2, FEATURES)).square().mean().backward()
        optimizer.step()
    with pytest.raises(StaleWeightsError) as caught:
        loss.backward()
    optimizer.zero_grad()
    model(torch.ones(2, FEATURES)).square().mean().backward()  # and then all is well again
    return str(caught.value)


@pytest.mark.parametrize("kind", ["step", "fused", "edit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_changed_between_forward_and_backward(run2, stage, kind):
    for text in run2(stale, stage, kind):
        assert ".weight" in text
        assert "between the forward" in text


@pytest.mark.parametrize("kind", ["step", "fused", "edit"])
def test_weights_changed_between_forward_and_backward_on_one_rank(kind):
    assert ".weight" in stale(3, kind)


def non_finite(stage: int) -> list[str]:
    model = shardproof.shard(Net(), stage)
    loss = model(torch.ones(2, FEATURES)).square().mean()
    if not dist.is_initialized() or dist.get_rank() == 0:  # one rank is enough
        loss = loss + (model.blocks[1].up.bias[-1] - model.blocks[1].up.bias[-1].detach()).abs().sqrt()
    else:
        loss = loss + model.blocks[1].up.bias.sum() * 0
    loss.backward()
    texts = []
    with pytest.raises(NonFiniteError) as caught:
        shardproof.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    texts.append(str(caught.value))
    with pytest.raises(RuntimeError) as plain:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    texts.append(str(plain.value))
    return texts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_non_finite_gradient_is_named_on_every_rank(run2, stage):
    for named, plain in run2(non_finite, stage):
        assert "blocks.1.up.bias" in named
        assert "blocks.0.up.bias" not in named
        assert "non-finite" in plain


def test_a_non_finite_gradient_is_named_on_one_rank():
    assert "blocks.1.up.bias" in non_finite(3)[0]


def misuse_of_whole() -> list[str]:
    model = shardproof.shard(Net(), 3)
    texts = []
    with shardproof.whole(model), pytest.raises(EngineError) as nested, shardproof.whole(model):
        pass
    texts.append(str(nested.value))
    with pytest.raises(EngineError) as trained, shardproof.whole(model):
        model(torch.ones(2, FEATURES)).sum().backward()
    texts.append(str(trained.value))
    return texts


def test_misuse_of_whole(run2):
    for nested, trained in run2(misuse_of_whole):
        assert "already" in nested
        assert "backward" in trained


def meshes() -> list[str]:
    texts = []
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replica", "data", "tensor"))
    with pytest.raises(EngineError) as three_dimensional:
        shardproof.shard(Net(), 3, mesh=cube)
    texts.append(str(three_dimensional.value))
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(EngineError) as outside:
            shardproof.shard(Net(), 3, mesh=half)
        texts.append(str(outside.value))
    return texts


def test_a_mesh_that_does_not_fit(run4):
    answers = run4(meshes)
    assert all("dimensions" in texts[0] for texts in answers)
    assert all("not in the mesh" in texts[1] for texts in answers[2:])


def sub_meshes(stage: int) -> None:
    """Two groups of two ranks train on their own data; ranks average within their group only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))["data"]
    group, rank = divmod(dist.get_rank(), 2)
    torch.manual_seed(group)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    shardproof.shard(model, stage, mesh=mesh)
    x = torch.randn(4, FEATURES)
    for net, part in ((model, x[2 * rank : 2 * rank + 2]), (plain, x)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(part).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    for name, value in shardproof.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_mesh_of_half_the_ranks_is_its_own_world(run4, stage):
    run4(sub_meshes, stage)


class Edits(Net):
    """Whose block is followed by an edit in place of what an operation has kept."""

    edit = "add"

    def run_block(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        h = super().run_block(block, h).sigmoid()
        if self.edit == "add":
            h += 1.0
        elif self.edit == "mask":
            h[h > 0.5] = 0.0
        elif self.edit == "no_grad":
            with torch.no_grad():
                h.mul_(2.0)
        elif self.edit == "before it is kept":
            h = h.mul(1.0).add_(1.0).tanh_().exp()
        return h


def edited(stage: int | None, edit: str) -> str:
    model = Edits()
    model.edit = edit
    if stage is not None:
        shardproof.shard(model, stage)
    try:
        model(torch.ones(2, FEATURES)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("edit", ["add", "mask", "no_grad", "before it is kept"])
def test_what_backward_needs_is_not_changed_in_place_as_in_torch(run2, edit):
    """torch leaves this check to whoever has hooks on what is saved, and the engine has."""
    wanted = edited(None, edit)
    assert bool(wanted) == (edit != "before it is kept")
    for stage in (0, 1, 2, 3):
        for told in (edited(stage, edit), *run2(edited, stage, edit)):
            assert told[:90] == wanted[:90], stage


def test_several_gradients_of_parameters_at_once_are_refused():
    model = shardproof.shard(Net(), 3)
    outputs = model(torch.ones(2, FEATURES))
    each = torch.eye(outputs.numel()).view(-1, *outputs.shape)
    with pytest.raises(EngineError, match="is_grads_batched"):
        torch.autograd.grad(outputs, [model.head.weight], each, is_grads_batched=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_that_changes_the_shape_is_named_and_one_may_remove_itself(stage):
    model = shardproof.shard(Net(), stage)
    called = []
    handle = model.head.weight.register_hook(lambda grad: (called.append(1), handle.remove())[1])
    model(torch.ones(2, FEATURES)).sum().backward()
    model(torch.ones(2, FEATURES)).sum().backward()
    assert called == [1]
    model.head.weight.register_hook(lambda grad: grad[:1])
    with pytest.raises(EngineError, match=r"hook of 'head.weight' changed the shape"):
        model(torch.ones(2, FEATURES)).sum().backward()
