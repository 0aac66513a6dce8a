"""The graphs: every shape of computation that must train alike on one process and on many, at every stage.

`CASES` maps a name to a `Case`. Each entry's comment or name says what is special; the failing behaviour elsewhere is
in public threads of other engines (a gradient reduced twice, a parameter of size 0, a hang on an unused module).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distributed.harness import Case, Env, mse_step
from zero.models import CLASSES, FEATURES, HIDDEN, WIDTH, Block, Net

CASES: dict[str, Case] = {}


def case(name: str, build: Callable[[], Any] = Net, step: Callable[..., Any] = mse_step, **fields: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(build, step, **fields)


def step(name: str, build: Callable[[], Any] = Net, **fields: Any) -> Callable[[Any], Any]:
    """Decorator: the function is the step of case `name`."""

    def add(fn: Any) -> Any:
        case(name, build, fn, **fields)
        return fn

    return add


def forward(name: str, depth: int = 3, block: type[nn.Module] = Block, **fields: Any) -> Callable[[Any], Any]:
    """Decorator: the function is the `forward(self, x)` of a `Net`, the case named `name` trains it."""

    def add(fn: Any) -> Any:
        kind = type("Net_" + name, (Net,), {"forward": fn})
        case(name, functools.partial(kind, block, depth), **fields)
        return fn

    return add


def mse(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


# -- plain -------------------------------------------------------------------------------------------------------------

case("plain")
case("plain_without_clipping", clip=None)
case("plain_gradients_not_looked_at", skip_grads=True)
case("zero_grad_to_zeros", set_to_none=False)
case("one_linear_without_blocks", lambda: nn.Linear(FEATURES, CLASSES))
case("sequential", lambda: nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))


@step("l2_loss_over_parameters_only")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """No module runs: the loss reads parameters only. Each rank's loss is the same, and so is its mean."""
    loss = sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    return loss


# -- parameters read outside the forward of their module ---------------------------------------------------------------


class WithAdapter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))


@step("dummy_zero_loss_over_an_unused_adapter", WithAdapter)
def _(env: Env, model: WithAdapter, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch) + sum(p.sum() for p in model.adapter.parameters()) * 0.0
    loss.backward()
    return loss


@forward("dummy_zero_loss_inside_forward")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.encode(x)) + sum(p.sum() for p in self.blocks[0].parameters()) * 0.0


@step("l2_regulariser_over_all_parameters")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    return loss


@step("l2_regulariser_computed_before_forward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    penalty = 1e-2 * sum(p.norm() for p in model.parameters())
    loss = penalty + mse(model, batch)
    loss.backward()
    return loss


@step("fused_loss_reads_the_head_weight")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.encode(batch["x"])
    loss = F.mse_loss(F.linear(h, model.head.weight, model.head.bias), batch["y"])
    loss.backward()
    return loss


@step("parameters_mixed_with_plain_tensors_outside", bits=False)  # several uses: added up in another order
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """matmul, indexing, transposition, concatenation, iteration over rows: none of them knows about shards."""
    w = model.blocks[1].up.weight  # (7, 5)
    h = batch["x"][:, :WIDTH] @ w.T
    extra = torch.cat([w[1:3].reshape(-1), model.head.bias, torch.ones(2)]).square().mean()
    per_row = sum(row.sum() for row in model.head.weight) * 0.1
    loss = mse(model, batch) + h.square().mean() + extra + per_row
    loss.backward()
    return loss


class Sibling(nn.Module):
    """Block whose `down` weights are used by its parent, never by `down` itself (as MultiheadAttention does)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.scale * F.linear(torch.tanh(self.up(h)), self.down.weight, self.down.bias)


case("child_weights_used_by_the_parent", functools.partial(Net, Sibling))


class Reaching(Net):
    """A block is run with a weight of the next one added: units reach into each other."""

    def run_block(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        other = self.blocks[-1].down.bias
        return block(h + 0.1 * other)


case("a_parent_reads_parameters_of_its_blocks", Reaching, bits=False)  # one bias is used three times


# -- checkpointing -----------------------------------------------------------------------------------------------------


class CheckpointInside(Block):
    reentrant = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


class CheckpointInsideReentrant(CheckpointInside):
    reentrant = True


class CheckpointCall(Block):
    """As transformers' GradientCheckpointingLayer does it: around `__call__`, hooks and all."""

    reentrant = False

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().__call__, h, use_reentrant=self.reentrant)


class CheckpointCallReentrant(CheckpointCall):
    reentrant = True


for reentrant, suffix in ((False, "nonreentrant"), (True, "reentrant")):
    inside = CheckpointInsideReentrant if reentrant else CheckpointInside
    call = CheckpointCallReentrant if reentrant else CheckpointCall
    case(f"checkpoint_inside_the_block_{suffix}", functools.partial(Net, inside))
    case(f"checkpoint_around_call_{suffix}", functools.partial(Net, call))

    @forward(f"checkpoint_outside_the_block_{suffix}")
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return self.head(self.norm(h))

    @forward(f"checkpoint_of_a_block_used_twice_{suffix}")
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        h = self.embed(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            h = checkpoint(block, h, use_reentrant=reentrant)
        return self.head(self.norm(self.blocks[2](h)))

    @forward(f"checkpoint_inside_a_block_used_twice_{suffix}", block=inside)
    def _(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[2]):
            h = block(h)
        return self.head(self.norm(h))

    @forward(f"checkpoint_of_a_segment_{suffix}", depth=4)
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        h = self.embed(x)
        for i in (0, 2):
            h = checkpoint(lambda h, i=i: self.blocks[i + 1](self.blocks[i](h)), h, use_reentrant=reentrant)
        return self.head(self.norm(h))

    @forward(f"checkpoint_of_the_head_{suffix}")
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        """As chunked losses do it: what is checkpointed belongs to the root unit."""
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return checkpoint(lambda h: self.head(torch.tanh(self.norm(h))), h, use_reentrant=reentrant)

    @forward(f"checkpoint_of_a_block_and_the_head_{suffix}", bits=False)  # norm is used three times
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        h = self.blocks[0](self.embed(x))
        h = checkpoint(lambda h: self.norm(self.blocks[1](self.norm(h))), h, use_reentrant=reentrant)
        return checkpoint(lambda h: self.head(torch.tanh(self.norm(self.blocks[2](h)))), h, use_reentrant=reentrant)

    case(
        f"checkpoint_with_units_inside_{suffix}",
        CASES[f"checkpoint_outside_the_block_{suffix}"].build,
        options={"units": ["*.norm", "head", "embed"]},
    )

    @forward(f"checkpoint_nested_{suffix}", block=inside)
    def _(self: Net, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return self.head(self.norm(h))

    @step(f"checkpoint_of_the_whole_model_{suffix}")
    def _(env: Env, model: Net, batch: dict[str, torch.Tensor], reentrant: bool = reentrant) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()  # reentrant checkpointing needs an input that asks for a gradient
        loss = F.mse_loss(checkpoint(model, x, use_reentrant=reentrant), batch["y"])
        loss.backward()
        return loss

    @step(f"checkpoint_with_a_frozen_embedding_{suffix}", functools.partial(Net, inside))
    def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """As a LoRA run does it: embedding frozen, its output made to require a gradient by a hook."""
        if env.k == 0:
            model.embed.requires_grad_(False)
            model.embed.register_forward_hook(lambda module, args, out: out.requires_grad_())
        loss = mse(model, batch)
        loss.backward()
        return loss


@forward("checkpoint_without_early_stop")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
    return self.head(self.norm(h))


@forward("checkpoint_mixed_kinds_and_accumulation")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    h = checkpoint(self.blocks[0], h, use_reentrant=True)
    h = checkpoint(self.blocks[1], h, use_reentrant=False)
    return self.head(self.norm(self.blocks[2](h)))


# -- saved-tensor hooks of the user ------------------------------------------------------------------------------------


@step("activations_offloaded_by_saved_tensor_hooks")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = mse(model, batch)
    loss.backward()
    return loss


@forward("saved_tensor_hooks_inside_forward_around_a_block")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    for block in self.blocks:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            h = block(h)
    return self.head(self.norm(h))


# -- blocks and weights used more than once ----------------------------------------------------------------------------


@forward("a_block_used_twice")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    for i in (0, 1, 0, 2, 1):
        h = self.blocks[i](h)
    return self.head(self.norm(h))


def shared_block() -> Net:
    net = Net()
    net.blocks[2] = net.blocks[0]
    return net


case("one_block_object_listed_twice", shared_block)


def shared_child() -> Net:
    net = Net()
    net.blocks[2].up = net.blocks[0].up
    return net


case("one_submodule_in_two_units", shared_child)


def tied_across_units() -> Net:
    net = Net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    net.blocks[2].norm.bias = net.norm.bias  # a block and the root
    return net


case("weights_tied_across_units", tied_across_units)


class TiedInside(Sibling):
    def __init__(self) -> None:
        super().__init__()
        self.down.weight = self.up.weight


case("weights_tied_within_a_unit", functools.partial(Net, TiedInside))


class Tokens(nn.Module):
    """Tied embedding and head, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def token_rows(k: int, n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2000 + k)
    return {"ids": torch.randint(0, 11, (n, 9), generator=generator)}


def token_step(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["ids"][:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())
    loss.backward()
    return loss


case("tied_embedding_and_head", Tokens, token_step, rows=token_rows)


class TiedAcrossModes(Tokens):
    """The tie is used in a third place, outside any module."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.embed.weight.mean(1)


case("tied_weight_also_read_directly", TiedAcrossModes, token_step, rows=token_rows)


# -- modes -------------------------------------------------------------------------------------------------------------


@step("backward_in_eval_mode_with_no_grad_passes_between")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        before = mse(model, batch)
    loss = mse(model, batch)
    with torch.no_grad():
        model(batch["x"][:1])
        model.blocks[1](torch.ones(2, WIDTH))
    loss.backward()
    with torch.no_grad():
        after = mse(model, batch)
    model.train()
    return [before, loss, after]


@step("inference_mode_before_the_first_step_and_between")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        before = mse(model, batch)
    loss = mse(model, batch)
    loss.backward()
    with torch.inference_mode():
        after = mse(model, batch)
    return [before, loss, after]


@step("inference_mode_between_forward_and_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = mse(model, batch)
    with torch.inference_mode():
        evaluated = mse(model.eval(), batch)
    model.train()
    loss.backward()
    return [loss, evaluated]


@step("a_forward_without_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    dropped = mse(model, batch).detach()
    model(batch["x"] * 2)
    loss = mse(model, batch)
    loss.backward()
    kept = model(batch["x"])  # alive until the next step
    env.keep["out"] = kept
    return [dropped, loss]


# -- frozen parameters -------------------------------------------------------------------------------------------------


def frozen_mixture() -> Net:
    net = Net()
    net.embed.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    net.blocks[1].up.weight.requires_grad_(False)
    net.blocks[2].norm.requires_grad_(False)
    net.blocks[2].down.bias.requires_grad_(False)
    return net


case("frozen_mixture", frozen_mixture)


def only_the_head() -> Net:
    net = Net()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    return net


case("all_blocks_frozen", only_the_head)


def only_the_first_block() -> Net:
    net = Net()
    net.requires_grad_(False)
    net.blocks[0].requires_grad_(True)
    return net


case("only_the_first_block_trains", only_the_first_block)


@step("frozen_and_unfrozen_between_steps", frozen_mixture, steps=5)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 1:
        model.blocks[0].requires_grad_(True)
        model.embed.weight.requires_grad_(True)
    if env.k == 2:
        model.blocks[1].requires_grad_(False)
        model.head.bias.requires_grad_(False)
    if env.k == 3:
        model.requires_grad_(True)
    if env.k == 4:
        for p in model.blocks.parameters():
            p.requires_grad = False
    loss = mse(model, batch)
    loss.backward()
    return loss


# -- several forwards, several backwards -------------------------------------------------------------------------------


@step("two_forwards_one_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch) + 0.5 * model(batch["x"] * 2).square().mean()
    loss.backward()
    return loss


for order, suffix in (((0, 1), "in_order"), ((1, 0), "in_reverse")):

    @step(f"two_forwards_two_backwards_{suffix}")
    def _(env: Env, model: Net, batch: dict[str, torch.Tensor], order: tuple[int, int] = order) -> list[torch.Tensor]:
        losses = [mse(model, batch), 0.5 * model(batch["x"] * 2).square().mean()]
        for i in order:
            losses[i].backward()
        return losses


@step("two_backwards_with_retain_graph")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@step("two_losses_over_one_trunk_with_retain_graph")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    h = model.encode(batch["x"])
    first, second = F.mse_loss(model.head(h), batch["y"]), h.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return [first, second]


@step("three_backwards_with_retain_graph_under_checkpointing", functools.partial(Net, CheckpointInside))
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@step("backward_to_some_inputs_only")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward(inputs=list(model.head.parameters()) + list(model.blocks[1].parameters()))
    return loss


@step("backward_to_one_parameter_of_a_block")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward(inputs=[next(model.blocks[1].parameters())])
    return loss


# -- accumulation ------------------------------------------------------------------------------------------------------


def _micro(batch: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of equal size: every part takes every `parts`-th row."""
    return [{name: value[i::parts] for name, value in batch.items()} for i in range(parts)]


@step("accumulation")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for part in _micro(batch, 2):
        loss = mse(model, part) / 2
        loss.backward()
        total += loss.detach()
    return total


@step("accumulation_with_no_sync")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    first, last = _micro(batch, 2)
    with env.no_sync(model):
        a = mse(model, first) / 2
        a.backward()
    b = mse(model, last) / 2
    b.backward()
    return a.detach() + b.detach()


@step("accumulation_with_no_sync_for_every_part")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """No backward outside: what was held back is reduced when the step asks for it."""
    total = torch.zeros(())
    with env.no_sync(model):
        for part in _micro(batch, 2):
            loss = mse(model, part) / 2
            loss.backward()
            total += loss.detach()
    return total


class Branches(nn.Module):
    """`pick` says which block runs; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, pick: int) -> torch.Tensor:
        return self.head(self.blocks[pick](self.embed(x)))


@step("micro_batches_use_different_modules", Branches)
def _(env: Env, model: Branches, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for i, part in enumerate(_micro(batch, 2)):
        loss = F.mse_loss(model(part["x"], (env.k + 2 * i) % 4), part["y"]) / 2
        loss.backward()
        total += loss.detach()
    return total


@step("micro_batches_use_different_modules_with_no_sync", Branches)
def _(env: Env, model: Branches, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    first, last = _micro(batch, 2)
    with env.no_sync(model):
        a = F.mse_loss(model(first["x"], env.k), first["y"]) / 2
        a.backward()
    b = F.mse_loss(model(last["x"], 3), last["y"]) / 2
    b.backward()
    return a.detach() + b.detach()


# -- unused parameters -------------------------------------------------------------------------------------------------


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].spare = nn.Parameter(torch.ones(3))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks[:-1]:
            h = block(h)
        return self.norm(h)


case("unused_parameters_and_weight_decay", Unused)


@step("a_parameter_used_only_now_and_then", Unused, steps=4)
def _(env: Env, model: Unused, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.encode(batch["x"])
    if env.k % 2:
        h = model.spare(model.blocks[-1](h))
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


case("unused_parameters_and_zero_grad_to_zeros", Unused, set_to_none=False)


# -- dtypes, buffers, shapes -------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """A block of all sorts: half-precision and integer parameters, buffers, a scalar, an empty one, strided ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen_half = nn.Parameter(torch.randn(WIDTH).half(), requires_grad=False)
        self.frozen_bf16 = nn.Parameter(torch.randn(3, WIDTH).bfloat16(), requires_grad=False)
        self.doubled = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.index = nn.Parameter(torch.tensor([1, 0, 3, 2, 4]), requires_grad=False)
        self.packed = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, WIDTH).t())  # (5, 3), strides (1, 5)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.running.mul_(0.9).add_(0.1 * self.table)
        h = h[:, self.index] + self.frozen_half.float() + self.frozen_bf16.float().sum(0) * self.mask
        h = h + (self.doubled * self.packed.sum() / 21).float() + self.running + self.empty.sum()
        return h + self.scale * self.linear(h) + h @ self.turned @ self.turned.t()


case("half_and_integer_parameters_buffers_scalars", functools.partial(Net, Kinds), bits=False)  # strided parameters


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(2 * 6, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.stack([x, -x], 1).view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            h = block(h).relu()
        return self.head(h.flatten(1))


case("channels_last_convolutions", Conv, bits=False)


class Attention(nn.Module):
    """torch's own layers that read their children's weights and keep lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.unsqueeze(1).repeat(1, 3, 1) * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


case("torch_transformer_layers", Attention)


@step("torch_transformer_layers_with_evaluation_on_the_fast_path", Attention)
def _(env: Env, model: Attention, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = mse(model, batch)
    loss.backward()
    model.eval()
    with torch.no_grad():
        evaluated = mse(model, batch)
    model.train()
    return [loss, evaluated]


class Recurrent(nn.Module):
    """LSTM and GRU keep `_flat_weights`, a second list of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(self.embed(x.view(-1, 3, 2)))
        return self.head(self.gru(h)[0][:, -1])


case("lstm_and_gru", Recurrent)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) * 0.3)
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        turned = h.to(torch.complex64) @ self.turn + self.shift
        return h + self.linear(turned.abs()) + turned.imag


class Conjugate(Complex):
    """A conjugate is a view of the same memory with one bit set."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        turned = h.to(torch.complex64) @ self.turn.conj()
        turned = turned * torch.sigmoid(turned.abs()) + turned.conj() @ self.turn.mH + self.shift.conj()
        return h + self.linear(turned.abs())


@step(  # torch cannot clip conjugate gradients, nor take Adam's step with them
    "conjugates_of_complex_parameters",
    functools.partial(Net, Conjugate),
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    skip_grads=True,
    clip=None,
)
@step("complex_parameters", functools.partial(Net, Complex), skip_grads=True)  # torch has no norms of them in float64
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = mse(model, batch)
    loss.backward()
    norms = [p.norm() for p in model.parameters()]
    assert not any(norm.is_complex() for norm in norms)
    return [loss, *norms]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(FEATURES, FEATURES) * 0.3) for _ in range(3))
        self.named = nn.ParameterDict({"scale": torch.ones(FEATURES), "shift": torch.zeros(FEATURES)})
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w)
        return self.head(x * self.named["scale"] + self.named["shift"])


case("parameter_lists_and_dicts", Lists)


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)


case("parametrized_weights", functools.partial(Net, WeightNormed))


class Added(nn.Module):
    def __init__(self, change: torch.Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.change


class ParametrizedForAForward(Block):
    """As PEFT adapts weights that are no layers (`target_parameters`): experts of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = self.up.weight.shape
        self.a, self.b = nn.Parameter(torch.randn(rows) * 0.3), nn.Parameter(torch.randn(columns) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.utils.parametrize.register_parametrization(self.up, "weight", Added(torch.outer(self.a, self.b)))
        try:
            return super().forward(x)
        finally:
            nn.utils.parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


case("weights_parametrized_for_a_forward", functools.partial(Net, ParametrizedForAForward))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@step("a_weight_that_is_parametrized_once_it_is_sharded")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if not nn.utils.parametrize.is_parametrized(model.blocks[1].up):
        nn.utils.parametrize.register_parametrization(model.blocks[1].up, "weight", Doubled())
    loss = mse(model, batch)
    loss.backward()
    return loss


class ParametrizedAgain(ParametrizedForAForward):
    """Recomputed without the hooks of the block, so that it is the parameter itself that is parametrized."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


for reentrant in (False, True):
    block = functools.partial(ParametrizedAgain, reentrant)
    case(f"weights_parametrized_for_a_forward_reentrant_{reentrant}".lower(), functools.partial(Net, block))


class Bf16Block(Block):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h.bfloat16()).float()


case("trainable_half_precision_blocks", functools.partial(Net, Bf16Block), tolerance=3e-2)


@step("autocast", tolerance=2e-2)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch["x"])
    loss = F.mse_loss(out.float(), batch["y"])
    loss.backward()
    return loss


# -- modules attached later --------------------------------------------------------------------------------------------


class Extra(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encode(x)
        return self.head(self.extra(h) if hasattr(self, "extra") else h)


def _attach(env: Env, model: Net) -> None:
    torch.manual_seed(5)
    model.extra = nn.Linear(WIDTH, WIDTH)
    env.optimizer.add_param_group({"params": list(model.extra.parameters())})


case("a_module_attached_before_the_first_forward", Extra, sharded=_attach)


@step("a_module_attached_between_steps", Extra, steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 2:
        _attach(env, model)
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("a_block_appended_between_steps", steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 1:
        torch.manual_seed(6)
        model.blocks.append(Block())
        env.optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("a_block_appended_and_first_used_in_inference_mode", steps=3)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """An adapter that is added to a model and looked at before it is trained."""
    if env.k == 1:
        torch.manual_seed(6)
        model.blocks.append(Block())
        env.optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
    with torch.inference_mode():
        before = mse(model, batch)
    loss = mse(model, batch)
    loss.backward()
    return [before, loss]


@forward("a_module_attached_in_mid_forward")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    """As PEFT does around experts: what is not in a block is shown as plain tensors just then, and trained."""
    h = self.embed(x)
    for block in self.blocks:
        block.for_now = nn.Identity()
        h = block(h)
        del block.for_now
    return self.head(self.norm(h))


# -- gradients of gradients --------------------------------------------------------------------------------------------


@step("penalty_on_the_gradient_of_the_input")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.mse_loss(out, batch["y"]) + 0.1 * g.square().sum(1).mean()
    loss.backward()
    return loss


@step("torch_func_over_inputs")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Rows one by one, and derivatives with respect to them, forward and backward; then backward to the parameters."""
    out = torch.func.vmap(lambda row: model(row[None])[0] + 0.1 * model.head.bias)(batch["x"])
    backward = torch.func.jacrev(lambda x: model(x).sum(0))(batch["x"])  # (3, n, 6)
    _, along = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    assert torch.allclose(backward.sum(-1).T, along, atol=1e-6)
    loss = F.mse_loss(out, batch["y"])
    loss.backward()
    return [loss, along.square().mean()]


@step("gradients_of_each_row_by_torch_func")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    def of_row(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, params, (x[None],)), y[None])

    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = torch.func.vmap(torch.func.grad(of_row), (None, 0, 0))(values, batch["x"], batch["y"])
    loss = mse(model, batch)
    loss.backward()
    return [loss, *(grad.mean(0).sum() for grad in rows.values())]


@step("transforms_over_detached_parameters")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """As torch's tutorials on gradients of each row, Hessians and forward mode take a model apart."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, params, (x,)), y)

    def of_bias(bias: torch.Tensor) -> torch.Tensor:
        return loss_of(values | {"head.bias": bias}, batch["x"], batch["y"])

    of_row = torch.func.grad(lambda params, x, y: loss_of(params, x[None], y[None]))
    rows = torch.func.vmap(of_row, (None, 0, 0))(values, batch["x"], batch["y"])
    ones = {name: torch.ones_like(p) for name, p in values.items()}
    value, along = torch.func.jvp(lambda params: loss_of(params, batch["x"], batch["y"]), (values,), (ones,))
    bend = torch.func.hessian(of_bias)(values["head.bias"])
    loss = mse(model, batch)
    loss.backward()
    return [loss, value, along, bend.sum(), *(grad.mean(0).sum() for grad in rows.values())]


@step("derivatives_in_forward_mode")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(batch["x"], torch.ones_like(batch["x"]))))
    loss = F.mse_loss(out.primal, batch["y"]) + 0.1 * out.tangent.square().mean()
    loss.backward()
    return [loss]


for which, pick in (
    ("the_head_weight", lambda model: [model.head.weight]),
    ("a_block_weight", lambda model: [model.blocks[1].up.weight, model.blocks[2].norm.bias]),
    ("all_parameters", lambda model: list(model.parameters())),
):

    @step(f"penalty_on_the_gradient_of_{which}")
    def _(env: Env, model: Net, batch: dict[str, torch.Tensor], pick: Any = pick) -> list[torch.Tensor]:
        loss = mse(model, batch)
        grads = torch.autograd.grad(loss, pick(model), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        total = loss + 0.1 * penalty
        total.backward()
        return [loss, penalty]


@step("autograd_grad_of_parameters_used_as_gradients")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """`torch.autograd.grad` instead of `backward`, the result put into `.grad` by hand."""
    loss = mse(model, batch)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params)
    for p, g in zip(params, grads, strict=True):
        assert g.shape == p.shape
        p.grad = g
    return [loss, sum(g.sum() for g in grads)]


@step("backward_with_create_graph")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    loss = F.mse_loss(model(x), batch["y"])
    loss.backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()
    return loss


# -- several models ----------------------------------------------------------------------------------------------------


def pair() -> dict[str, nn.Module]:
    return {"student": Net(), "teacher": Net(depth=2).requires_grad_(False)}


@step("student_and_frozen_teacher_in_one_loss", pair)
def _(env: Env, models: dict[str, Net], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        target = models["teacher"](batch["x"])
    loss = F.mse_loss(models["student"](batch["x"]), target) + mse(models["student"], batch)
    loss.backward()
    return loss


def chain() -> dict[str, nn.Module]:
    return {"a": Net(), "b": nn.Sequential(nn.Linear(CLASSES, 4), nn.Linear(4, CLASSES))}


@step("two_trained_models_in_one_graph", chain)
def _(env: Env, models: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(models["b"](models["a"](batch["x"])), batch["y"])
    loss.backward()
    return loss


@step("three_models_in_one_loss", lambda: {"a": Net(), "b": Net(depth=2), "c": Net(depth=1)})
def _(env: Env, models: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(models["a"], batch) + mse(models["b"], batch) * (1 + models["c"](batch["x"]).mean(0).sum() * 0)
    loss = loss + (models["a"](batch["x"]) - models["c"](batch["x"])).square().mean()
    loss.backward()
    return loss


def _reference_copy(env: Env, model: Net) -> None:
    env.keep["reference"] = copy.deepcopy(model).requires_grad_(False)


@step("a_frozen_deepcopy_as_reference_model", sharded=_reference_copy)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        target = env.keep["reference"](batch["x"])
    loss = mse(model, batch) + F.mse_loss(model(batch["x"]), target)
    loss.backward()
    return loss


def _twin(env: Env, model: Net) -> None:
    env.keep["twin"] = copy.deepcopy(model)
    env.optimizer.add_param_group({"params": list(env.keep["twin"].parameters())})


@step("a_trained_deepcopy", sharded=_twin)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = mse(model, batch) + 2 * mse(env.keep["twin"], batch)
    loss.backward()
    return [loss, sum(p.detach().square().sum() for p in env.keep["twin"].parameters())]


def _block_copy(env: Env, model: Net) -> None:
    env.keep["block"] = copy.deepcopy(model.blocks[1])  # a plain module again, which is sharded by itself
    env.engine.shard(env.keep["block"])
    env.optimizer.add_param_group({"params": list(env.keep["block"].parameters())})


@step("a_trained_deepcopy_of_a_submodule", sharded=_block_copy)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    h = env.keep["block"](model.encode(batch["x"]))
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return [loss, sum(p.detach().square().sum() for p in env.keep["block"].parameters())]


@step("a_deepcopy_of_a_block_attached_to_the_model", Extra, steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 1:
        model.extra = copy.deepcopy(model.blocks[1])
        env.optimizer.add_param_group({"params": list(model.extra.parameters())})
    loss = mse(model, batch)
    loss.backward()
    return loss


def _linear_copy(env: Env, model: Net) -> None:
    env.keep["linear"] = copy.deepcopy(model.blocks[1].up)


@step("a_deepcopy_of_a_layer_inside_a_unit", sharded=_linear_copy)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    frozen = env.keep["linear"](batch["x"][:, :WIDTH]).detach().square().mean()
    loss = mse(model, batch)
    loss.backward()
    return [loss, frozen]


# -- other ways in -----------------------------------------------------------------------------------------------------


@step("another_method_and_submodules_called_directly")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.encode(batch["x"])
    h = model.blocks[1](h)
    h = h + model.blocks[0].up(h)[:, :WIDTH]  # a layer inside a unit
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


@step("another_method_of_a_block_called_directly")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.embed(batch["x"])
    for block in model.blocks:
        h = block.inner(h)
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


@step("forward_called_without_hooks")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.embed.forward(batch["x"])
    for block in model.blocks:
        h = block.forward(h)
    loss = F.mse_loss(model.head.forward(h), batch["y"])
    loss.backward()
    return loss


@step("functional_call_with_own_weights")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    head = {name: p * 2 for name, p in model.head.named_parameters()}
    h = model.encode(batch["x"])
    loss = F.mse_loss(torch.func.functional_call(model.head, head, (h,)), batch["y"])
    loss.backward()
    return loss


# -- forwards that return any object -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Slots:
    __slots__ = ("hidden", "logits")

    def __init__(self, logits: torch.Tensor, hidden: Any) -> None:
        self.logits, self.hidden = logits, hidden


Tuple = namedtuple("Tuple", ["logits", "hidden"])


class Closure:
    """Holds the tensors where nothing that walks over outputs can find them."""

    def __init__(self, logits: torch.Tensor, hidden: list[torch.Tensor]) -> None:
        self._read = lambda name: {"logits": logits, "hidden": hidden}[name]

    logits = property(lambda self: self._read("logits"))
    hidden = property(lambda self: self._read("hidden"))


class Boxed(nn.Module):
    """A block that takes and returns its hidden state in the same kind of object."""

    kind: Any = dict

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, box: Any) -> Any:
        h = box["logits"] if isinstance(box, dict) else box.logits
        return self.kind(logits=self.block(h), hidden=[h])


def outputs(kind: Any) -> type[nn.Module]:
    block = type("BoxedBlock", (Boxed,), {"kind": staticmethod(kind)})

    class Boxes(Net):
        def __init__(self) -> None:
            super().__init__(block)

        def forward(self, x: torch.Tensor) -> Any:
            box = kind(logits=self.embed(x), hidden=[])
            hidden = []
            for b in self.blocks:
                box = b(box)
                hidden += box["hidden"] if isinstance(box, dict) else box.hidden
            h = box["logits"] if isinstance(box, dict) else box.logits
            return kind(logits=self.head(self.norm(h)), hidden=[{"deep": (h, hidden)}])

    return Boxes


for kind in (dict, Output, Slots, Tuple, Closure):

    @step(f"forward_returns_{kind.__name__.lower()}", outputs(kind))
    def _(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"])
        get = out.__getitem__ if isinstance(out, dict) else functools.partial(getattr, out)
        h, hidden = get("hidden")[0]["deep"]
        loss = F.mse_loss(get("logits"), batch["y"]) + h.square().mean() + sum(t.square().mean() for t in hidden)
        loss.backward()
        return loss


class Generator(Net):
    """A forward that is a generator: layers run while the caller iterates."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            yield self.head(h)


@step("forward_is_a_generator", Generator)
def _(env: Env, model: Generator, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = sum(F.mse_loss(out, batch["y"]) for out in model(batch["x"]))
    loss.backward()
    return loss


class ReturnsParameter(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encode(x)), self.head.weight, self.blocks[0].up.weight[:2]


@step("forward_returns_parameters_and_views_of_them", ReturnsParameter)
def _(env: Env, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out, whole, view = model(batch["x"])
    loss = F.mse_loss(out, batch["y"]) + 0.1 * whole.square().sum() + 0.1 * view.square().sum()
    loss.backward()
    return loss


# -- failures on the way -----------------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


@step("exception_in_backward_then_a_clean_retry")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.embed(batch["x"])
    for i, block in enumerate(model.blocks):
        h = Fuse.apply(block(h)) if i == 1 else block(h)
    try:
        model.head(model.norm(h)).square().mean().backward()
    except ZeroDivisionError:
        env.optimizer.zero_grad()
    else:
        raise AssertionError("the fuse did not blow")
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("exception_in_backward_under_checkpointing_then_a_clean_retry", functools.partial(Net, CheckpointInside))
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    CASES["exception_in_backward_then_a_clean_retry"].step(env, model, batch)
    env.optimizer.zero_grad()
    loss = mse(model, batch)
    loss.backward()
    return loss


class Fragile(Block):
    fail = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.norm(h)
        if self.fail:
            raise ZeroDivisionError("in forward")
        return super().forward(h)


@step("exception_in_forward_then_a_clean_retry", functools.partial(Net, Fragile))
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.blocks[1].fail = True
    try:
        model(batch["x"])
    except ZeroDivisionError:
        model.blocks[1].fail = False
    loss = mse(model, batch)
    loss.backward()
    return loss


# -- order -------------------------------------------------------------------------------------------------------------


class Shuffled(Net):
    order: Any = (0, 1, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for i in self.order:
            h = self.blocks[i](h)
        return self.norm(h)


@step("blocks_in_changing_order", Shuffled, steps=5)
def _(env: Env, model: Shuffled, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.order = [(0, 1, 2), (2, 1, 0), (1,), (1, 0, 2), (0, 0, 2)][env.k]
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("blocks_removed_from_the_list", steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Layer drop: some steps run a shorter model, by way of another list of the same blocks."""
    blocks = model.blocks
    if env.k % 2:
        model.blocks = nn.ModuleList([blocks[2], blocks[0]])
    loss = mse(model, batch)
    loss.backward()
    model.blocks = blocks
    return loss


# -- in-place edits under no_grad --------------------------------------------------------------------------------------


def edited(name: str, **fields: Any) -> Callable[[Any], Any]:
    """Decorator: the function edits the model between steps; the case trains on with the edited weights."""

    def add(edit: Any) -> Any:
        def edit_and_train(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            value = edit(env, model)
            loss = mse(model, batch)
            loss.backward()
            return [loss] if value is None else [loss, value]

        case(name, fields.pop("build", Net), edit_and_train, **fields)
        return edit

    return add


@edited("edit_mul_add_fill_by_scalars")
@torch.no_grad()
def _(env: Env, model: Net) -> None:
    for p in model.parameters():
        p.mul_(0.9)
    model.blocks[0].up.weight.add_(0.01)
    model.blocks[1].norm.bias.fill_(0.25)
    model.head.bias.zero_()
    model.blocks[2].down.weight.clamp_(-0.2, 0.2)
    model.blocks[2].up.weight.data.div_(1.5)


@edited("edit_copy_from_tensors_and_parameters")
@torch.no_grad()
def _(env: Env, model: Net) -> None:
    model.blocks[0].up.weight.copy_(torch.full((7, 5), 0.1) + model.blocks[1].up.weight)
    model.blocks[2].down.weight.copy_(model.blocks[0].down.weight)
    model.blocks[1].norm.weight.copy_(torch.tensor(1.5))
    model.embed.weight.data.copy_(torch.linspace(-1, 1, 30).view(5, 6))


@edited("edit_by_nn_init")
def _(env: Env, model: Net) -> torch.Tensor:
    if env.k == 1:
        nn.init.normal_(model.blocks[0].up.weight, std=0.3)
        nn.init.xavier_uniform_(model.blocks[1].down.weight)
        nn.init.kaiming_uniform_(model.head.weight, a=5**0.5)
        nn.init.zeros_(model.head.bias)
        nn.init.orthogonal_(model.blocks[2].up.weight)
        nn.init.trunc_normal_(model.embed.weight, std=0.2)
        model.blocks[1].up.weight.data.uniform_(-0.1, 0.1)
    return torch.rand(())  # the generator stands where it would in one process


@edited("edit_by_reset_parameters")
def _(env: Env, model: Net) -> torch.Tensor:
    if env.k == 1:
        model.blocks[0].up.reset_parameters()
        model.blocks[0].norm.reset_parameters()
        model.head.apply(lambda m: m.reset_parameters())
    return torch.rand(())


@edited("edit_rows_through_data")
def _(env: Env, model: Net) -> None:
    model.blocks[0].up.weight.data[1].zero_()
    model.blocks[1].up.weight.data[2:4, 1] += 0.5
    model.embed.weight.data[0] = torch.arange(6.0)
    with torch.no_grad():
        model.head.weight[1].mul_(2)
        model.head.bias[0] = 3.0
        model.blocks[2].down.weight[:, 2] = 0.0
        model.blocks[2].norm.weight.view(-1)[3].fill_(0.5)


@edited("edit_by_assigning_data")
def _(env: Env, model: Net) -> None:
    if env.k == 1:
        model.blocks[0].up.weight.data = torch.linspace(-1, 1, 35).view(7, 5)
        model.head.bias.data = model.head.bias.data * 2 + 1


@edited("edit_by_masks_and_foreach")
@torch.no_grad()
def _(env: Env, model: Net) -> None:
    w = model.blocks[1].up.weight
    w[w < 0] = 0.0
    model.head.weight.masked_fill_(model.head.weight > 0.3, 0.3)
    torch._foreach_mul_(list(model.blocks[0].parameters()), 0.9)
    torch._foreach_lerp_(list(model.blocks[2].parameters()), list(model.blocks[0].parameters()), 0.1)


@edited("edit_by_addition_of_another_parameter")
@torch.no_grad()
def _(env: Env, model: Net) -> None:
    a, b = model.blocks[0], model.blocks[1]
    a.up.weight.add_(b.up.weight, alpha=0.1)
    a.up.weight -= 0.1 * b.up.weight
    a.down.weight.addcmul_(b.down.weight, b.down.weight, value=0.5)
    a.down.bias.sub_(b.down.bias)


def _ema_copy(env: Env, model: Net) -> None:
    env.keep["ema"] = copy.deepcopy(model).requires_grad_(False)


@edited("ema_by_lerp", sharded=_ema_copy)
def _(env: Env, model: Net) -> torch.Tensor:
    ema = env.keep["ema"]
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.lerp_(p, 0.1)
        return ema(torch.ones(1, FEATURES)).square().sum() + sum(e.square().sum() for e in ema.parameters())


def _averaged(env: Env, model: Net) -> None:
    env.keep["ema"] = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )


@edited("ema_by_averaged_model", sharded=_averaged)
def _(env: Env, model: Net) -> torch.Tensor:
    ema = env.keep["ema"]
    ema.update_parameters(model)
    with torch.no_grad():
        return ema(torch.ones(1, FEATURES)).square().sum()


class Clamping(Net):
    """CLIP clamps its logit scale in forward; this one also uses it there."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.logit_scale.clamp_(0, 1.5)
        self.blocks[0].norm.weight.data.clamp_(0.5, 0.9)
        return self.head(self.encode(x)) * self.logit_scale.exp()


case("edit_in_forward_by_clamp", Clamping)


class Assigning(Clamping):
    """As open_clip does: the clamped value is assigned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.logit_scale.data = self.logit_scale.data.clamp(0, 1.5)
        self.norm.bias.data = self.norm.bias.data  # nothing
        return self.head(self.encode(x)) * self.logit_scale.exp()


case("edit_in_forward_by_assigning_data", Assigning)


class Momentum(Net):
    """As MoCo does: a frozen copy follows what is trained, and its features are a target."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.slow = nn.ModuleDict({"embed": nn.Linear(FEATURES, WIDTH), "block": Block()}).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        fast = [*self.embed.parameters(), *self.blocks[0].parameters()]
        slow = [*self.slow["embed"].parameters(), *self.slow["block"].parameters()]
        for new, old in zip(fast, slow, strict=True):
            if self.how == "assigned":
                old.data = 0.6 * old.data + 0.4 * new.data
            elif self.how == "data":
                old.data.mul_(0.6).add_(new.data, alpha=0.4)
            else:
                old.detach()[:2].lerp_(new.detach()[:2], 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        target = self.head(self.slow["block"](self.slow["embed"](x)))
        return self.head(self.encode(x)) - 0.5 * target.detach()


for how in ("assigned", "data", "rows"):
    case(f"momentum_encoder_in_forward_{how}", functools.partial(Momentum, how))


class OwnTeacher(Net):
    """A frozen teacher that edits itself whenever it is asked, which is without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Fading().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.head(self.slow(self.embed(x)))
        return self.head(self.encode(x)) - 0.5 * target


class Fading(Block):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.mul_(0.8)
        return super().forward(h)


case("teacher_that_edits_itself_without_gradients", OwnTeacher)


class Filled(Block):
    """As Glow's ActNorm: its first pass fills in what it will train."""

    filled = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if not self.filled:
            self.norm.weight.data.fill_(0.7)
            self.up.bias.data = torch.full_like(self.up.bias.data, 0.2)
            self.filled = True
        return super().forward(h)


@step("values_filled_in_by_a_first_pass_without_gradients", functools.partial(Net, Filled))
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if not model.blocks[0].filled:
        with torch.no_grad():
            mse(model, batch)
    loss = mse(model, batch)
    loss.backward()
    return loss


class ClampingBlock(Block):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(h)


case("edit_in_the_forward_of_a_unit", functools.partial(Net, ClampingBlock))


@step("edit_through_whole_with_writeback")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with env.whole(model, writeback=True):
        assert type(model.head.weight) is nn.Parameter
        with torch.no_grad():
            model.head.weight[0] = model.blocks[0].up.weight[0]
            model.blocks[1].up.weight.mul_(0.5)
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("whole_for_an_evaluation_loop")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with env.whole(model), torch.no_grad():
        first = sum(mse(model, part) for part in _micro(batch, 2))
    loss = mse(model, batch)
    loss.backward()
    return [first, loss]


# -- hooks of the user -------------------------------------------------------------------------------------------------


def _scale_gradient(env: Env, model: Net) -> None:
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 0.5)
    model.head.bias.register_hook(lambda grad: grad + 0.01)


case("gradient_hooks_on_parameters", sharded=_scale_gradient)


def _trains_some_rows() -> Net:
    """With hooks from before it is sharded, as code that trains some tokens of an embedding has them."""
    model = Net()
    model.embed.weight.register_hook(lambda grad: grad * (torch.arange(len(grad), device=grad.device) < 2)[:, None])
    model.head.bias.register_hook(lambda grad: grad + 0.01)
    return model


case("gradient_hooks_from_before", build=_trains_some_rows)


@step("gradients_edited_before_the_step", clip=None)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
    model.head.bias.grad.zero_()
    model.blocks[1].up.weight.grad.clamp_(-0.01, 0.01)
    model.blocks[2].up.weight.grad = None
    model.embed.weight.grad = model.embed.weight.grad + 0.1
    nn.utils.clip_grad_value_(model.blocks[0].parameters(), 0.02)
    return loss


def _capture(env: Env, model: Net) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        env.keep["hidden"] = out
        return out * 1.5

    model.blocks[1].register_forward_hook(hook)
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(),))
    model.blocks[2].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))


@step("module_hooks_that_capture_and_change", sharded=_capture)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch) + env.keep["hidden"].square().mean()
    loss.backward()
    return loss


# -- optimizers --------------------------------------------------------------------------------------------------------

for name, make in {
    "adamw_for_loop": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=False),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "adam_amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-4, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_momentum_fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-4),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=1.0, eps=1e-3),
    "adamax": functools.partial(torch.optim.Adamax, lr=1e-2, eps=1e-4),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2, eps=1e-4),
    "radam": functools.partial(torch.optim.RAdam, lr=1e-2, eps=1e-4),
}.items():
    case(f"optimizer_{name}", optimizer=make)


def _groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


case("optimizer_parameter_groups", optimizer=_groups)


@step("optimizer_step_with_closure", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    def closure() -> torch.Tensor:
        env.optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        return loss

    first = env.optimizer.step(closure)
    loss = closure()
    return [first, loss]


def _two_optimizers(env: Env, model: Net) -> None:
    env.keep["head"] = torch.optim.SGD(model.head.parameters(), lr=0.1)


@step("two_optimizers_on_one_model", sharded=_two_optimizers)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """GAN style: one optimizer steps, then the other, each after its own backward."""
    first = mse(model, batch)
    first.backward()
    env.keep["head"].step()
    env.optimizer.zero_grad()
    loss = mse(model, batch)
    loss.backward()
    return [first, loss]


def _scheduled(env: Env, model: Net) -> None:
    env.keep["schedule"] = torch.optim.lr_scheduler.OneCycleLR(env.optimizer, max_lr=0.05, total_steps=6)


@step("learning_rate_schedule", sharded=_scheduled, steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k:
        env.keep["schedule"].step()
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("optimizer_state_saved_and_loaded_between_steps", steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A new optimizer takes over from the state dict of the old one."""
    if env.k == 2:
        state = copy.deepcopy(env.optimizer.state_dict())
        env.optimizer.state.clear()
        env.optimizer.load_state_dict(state)
    loss = mse(model, batch)
    loss.backward()
    return loss


@step("gradient_scaler", clip=None)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    scaler = env.keep.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1))
    loss = mse(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(env.optimizer)
    scaler.step(env.optimizer)
    scaler.update()
    env.optimizer.zero_grad()
    return loss


def _step_in_backward(env: Env, model: Net) -> None:
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=0.05, momentum=0.9)

        def hook(p: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        p.register_post_accumulate_grad_hook(hook)


case("optimizer_steps_in_backward_by_hooks", sharded=_step_in_backward, clip=None)


# -- code that keeps parameters in its own places ----------------------------------------------------------------------


class KeepsReferences(Block):
    """Holds its parameters in a plain list and in a closure, as some hand-made layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.up.weight, self.up.bias]
        self.call = functools.partial(F.linear, weight=self.down.weight, bias=self.down.bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.call(torch.tanh(F.linear(self.norm(h), *self.kept)))


def keeps_references() -> Net:
    return Net(KeepsReferences)


case("parameters_kept_in_lists_and_closures", keeps_references)


class OwnFunction(torch.autograd.Function):
    """Saves one weight as autograd wishes, keeps the other by itself."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        middle = h @ up.t()
        ctx.save_for_backward(h, up, middle)
        ctx.down = down
        return middle @ down.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, up, middle = ctx.saved_tensors
        inner = grad @ ctx.down
        return inner @ up, inner.t() @ h, grad.t() @ middle


class OwnFunctionBlock(Block):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + OwnFunction.apply(self.norm(h), self.up.weight, self.down.weight)


case("autograd_function_that_keeps_the_raw_weight", functools.partial(Net, OwnFunctionBlock))


@step("autograd_function_outside_any_module")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = OwnFunction.apply(model.encode(batch["x"]), model.blocks[0].up.weight, model.blocks[1].down.weight)
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


class SpectralNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


case("spectral_norm", functools.partial(Net, SpectralNormed), tolerance=1e-5)


class LegacyWeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.up)


case("legacy_weight_norm_by_hooks", functools.partial(Net, LegacyWeightNormed))


class Sparse(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, sparse=True)


case(
    "sparse_embedding_gradients",
    Sparse,
    token_step,
    rows=token_rows,
    clip=None,
    skip_grads=True,
    bits=False,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
)


class Towers(nn.Module):
    """Encoder and decoder: two lists of blocks, the second sees the end of the first in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, WIDTH), nn.Linear(3, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, h = self.left(x[:, :3]), self.right(x[:, 3:])
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            h = block(h + memory)
        return self.head(h)


case("two_towers", Towers)


class Stack(nn.Module):
    """Lists of blocks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for _ in range(2):
            stage = nn.Module()
            stage.blocks = nn.ModuleList(Block() for _ in range(2))
            stage.out = nn.Linear(WIDTH, WIDTH)
            self.stages.append(stage)
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for stage in self.stages:
            for block in stage.blocks:
                h = block(h)
            h = stage.out(h)
        return self.head(h)


case("blocks_inside_stages_that_have_no_forward", Stack)
case("units_within_units", Stack, options={"units": ["stages.*", "stages.*.blocks.*"]})
case("every_layer_a_unit", Net, options={"units": [nn.Linear, nn.LayerNorm]})
case("no_units_but_the_root", Net, options={"units": []})


def selective(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@forward("checkpoint_selective", bits=True)
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    context = functools.partial(create_selective_checkpoint_contexts, selective)
    for block in self.blocks:
        h = checkpoint(block, h, use_reentrant=False, context_fn=context)
    return self.head(self.norm(h))


@step("torch_autograd_backward_of_two_losses")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    h = model.encode(batch["x"])
    losses = [F.mse_loss(model.head(h), batch["y"]), h.square().mean()]
    torch.autograd.backward(losses)
    return losses


@step("backward_of_a_tensor_with_a_given_gradient")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(batch["x"])
    out.backward(torch.ones_like(out) / out.numel())
    return out.mean()


@step("part_of_the_graph_detached_and_continued_by_hand")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pipeline style: backward of the second half first, then of the first half with the gradient in between."""
    first = model.blocks[0](model.embed(batch["x"]))
    middle = first.detach().requires_grad_()
    loss = F.mse_loss(model.head(model.norm(model.blocks[2](model.blocks[1](middle)))), batch["y"])
    loss.backward()
    first.backward(middle.grad)
    return loss


@step("backward_inside_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A hook that runs another backward through the model while one is under way."""
    h = model.encode(batch["x"])

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            (0.5 * model(batch["x"] * 2).square().mean()).backward()

    h.register_hook(hook)
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


@step("evaluation_inside_backward")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.encode(batch["x"])

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return grad * model(torch.ones(1, FEATURES, device=grad.device)).square().mean()

    h.register_hook(hook)
    loss = F.mse_loss(model.head(h), batch["y"])
    loss.backward()
    return loss


@step("gradients_read_between_two_backwards")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    first = mse(model, batch)
    first.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    second = model(batch["x"] * 2).square().mean()
    (second * norm.detach()).backward()
    return [first, norm, second]


@step("zero_grad_of_a_part_between_two_backwards")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """GAN style: what one loss left on part of the model is thrown away before the other adds its own."""
    mse(model, batch).backward()
    model.blocks[1].zero_grad()
    model.head.zero_grad()
    loss = model(batch["x"] * 2).square().mean()
    loss.backward()
    return loss


@step("gradients_kept_and_put_back")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Two tasks, their gradients compared and merged by hand (as PCGrad and friends do)."""
    params = list(model.parameters())
    loss = mse(model, batch)
    loss.backward()
    kept = [p.grad.clone() for p in params]
    env.optimizer.zero_grad()
    model(batch["x"] * 2).square().mean().backward()
    dot = sum((g * p.grad).sum() for g, p in zip(kept, params, strict=True))
    for g, p in zip(kept, params, strict=True):
        p.grad = p.grad * 0.5 + g * torch.sigmoid(dot)
    return loss


@step("sharpness_aware_minimisation", clip=None)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Step up along the gradient, take the gradient there, step back down: edits by whole gradients."""
    params = list(model.parameters())
    first = mse(model, batch)
    first.backward()
    norm = nn.utils.get_total_norm([p.grad for p in params])
    with torch.no_grad():
        moves = [0.05 * p.grad / norm for p in params]
        for p, move in zip(params, moves, strict=True):
            p.add_(move)
    env.optimizer.zero_grad()
    second = mse(model, batch)
    second.backward()
    with torch.no_grad():
        for p, move in zip(params, moves, strict=True):
            p.sub_(move)
    return [first, second]


@step("gradient_reversal_and_stop_gradient")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.blocks[0](model.embed(batch["x"]))
    h = 2 * h.detach() - h
    with torch.no_grad():
        prefix = model.blocks[1](h)
    loss = F.mse_loss(model.head(model.blocks[2](prefix) + h), batch["y"])
    loss.backward()
    return loss


def nothing_trains() -> dict[str, nn.Module]:
    return {"frozen": Net().requires_grad_(False), "head": nn.Linear(CLASSES, CLASSES), "empty": nn.Identity()}


@step("models_without_trainable_or_any_parameters", nothing_trains)
def _(env: Env, models: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(models["head"](models["empty"](models["frozen"](batch["x"]))), batch["y"])
    loss.backward()
    return loss


@step("dropout_with_checkpointing", functools.partial(Net, CheckpointInside), batch=8)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mask must be that of the forward pass again. Each rank draws the same mask for one repeated row."""
    same = {name: value[:1] * 0 + value.new_tensor(0.1 * env.k) for name, value in batch.items()}
    torch.manual_seed(50 + env.k)
    h = model.embed(same["x"])
    for block in model.blocks:
        h = checkpoint(lambda h, block=block: F.dropout(block(h), 0.3), h, use_reentrant=False)
    loss = F.mse_loss(model.head(h), same["y"])
    loss.backward()
    return loss


# -- parameters and gradients that are held and handed on --------------------------------------------------------------


class KeptAside(Block):
    """Its weights in a list, which the unit does not look into: functions of one's own get them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.up.weight, self.down.weight]

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h + OwnFunction.apply(self.norm(h), *self.kept)


case("own_function_of_weights_kept_in_a_list", functools.partial(Net, KeptAside))


@forward("own_function_of_the_weights_of_a_block")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.encode(x)
    return self.head(h + OwnFunction.apply(h, self.blocks[0].up.weight, self.blocks[1].down.weight))


@step("checkpoint_of_a_function_of_weights_reentrant")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = model.encode(batch["x"])
    logits = checkpoint(F.linear, h, model.head.weight, model.head.bias, use_reentrant=True)
    loss = F.mse_loss(logits, batch["y"])
    loss.backward()
    return loss


@step("detached_weight_that_requires_a_gradient")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = model.head.weight.detach().requires_grad_()
    F.linear(torch.ones(2, WIDTH), weight).square().mean().backward()
    assert weight.is_leaf
    assert model.head.weight.grad is None
    loss = mse(model, batch) + weight.grad.square().sum() * model.head.bias.sum()
    loss.backward()
    return loss


@step("gradients_held_while_more_is_added")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    loss.backward()
    held = [p.grad for p in model.parameters()]
    model(batch["x"]).square().mean().backward()
    with torch.no_grad():
        torch._foreach_mul_(held, 0.5)
    return loss


@step("norms_of_a_matrix")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        up = model.blocks[1].up.weight
        orders = (2, 1, float("inf"), "nuc", "fro", None)
        size = sum(torch.linalg.norm(up, order) for order in orders) + torch.linalg.norm(model.head.bias, 1)
    loss = mse(model, batch) * size
    loss.backward()
    return loss


@step("state_dict_and_gradients_in_inference_mode")
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        size = sum(value.sum() for value in model.state_dict().values()).item()
    loss = mse(model, batch) * size
    loss.backward()
    with torch.inference_mode():
        assert all(torch.isfinite(p.grad * 2).all() for p in model.parameters())
    return loss


@step("parameters_made_of_the_data_of_others", steps=4)
def _(env: Env, model: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if env.k == 2:
        model.head.weight = nn.Parameter(model.head.weight.data)
        model.blocks[0].up.bias = nn.Parameter(model.blocks[1].up.bias.detach() * 1.0)
        assert env.optimizer is not None
        env.optimizer.add_param_group({"params": [model.head.weight, model.blocks[0].up.bias]})
    loss = mse(model, batch)
    loss.backward()
    return loss


# -- functions that compute with a module once more in their backward --------------------------------------------------


class ComputedAgain(torch.autograd.Function):
    """Checkpointing as guided diffusion has it, which takes parameters as arguments and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], h: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.fn, ctx.h, ctx.params = fn, h, params
        return fn(h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h = ctx.h.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.fn(h.view_as(h))
        return None, *torch.autograd.grad(out, (h, *ctx.params), grad, allow_unused=True)


@forward("checkpoint_by_a_function_of_the_parameters_of_a_block")
def _(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    for block in self.blocks:
        h = ComputedAgain.apply(block, h, *block.parameters())
    return self.head(self.norm(h))


class Adjoint(torch.autograd.Function):
    """A differential equation solved in steps, and backwards for its gradients, as torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], h: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.fn = fn
        for _ in range(2):
            h = h + 0.3 * fn(h)
        ctx.save_for_backward(h, *params)
        return h

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, *params = ctx.saved_tensors
        found = [torch.zeros_like(p) for p in params]
        for _ in range(2):
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                speed = ctx.fn(h)
            back, *more = torch.autograd.grad(speed, (h, *params), grad, allow_unused=True)
            found = [f if m is None else f + 0.3 * m for f, m in zip(found, more, strict=True)]
            h, grad = h - 0.3 * speed.detach(), grad + 0.3 * back
        return None, grad, *found


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.kept = tuple(self.speed.parameters())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(self.speed, Adjoint.apply(self.speed, h, *self.kept), *self.kept)


case("adjoint_of_an_equation", functools.partial(Net, Solved), bits=False)
