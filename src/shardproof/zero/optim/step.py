"""Optimizers see slices: torch's own step hooks swap parameters for their local slices during a step.

[Note: swapping instead of intercepting]
In a step the optimizer works on plain tensors that share memory with the shard, so that element-wise
optimizers run unchanged, plain, `foreach` or `fused`, without the cost of a tensor subclass. Outside the
step, `param_groups` and `state` hold the parameters, as users expect.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardproof.errors import DesyncError, EngineError
from shardproof.zero.optim.outside import Outside
from shardproof.zero.optim.owners import Owners
from shardproof.zero.optim.slices import Slices
from shardproof.zero.optim.state import (
    beside,
    check_loaded,
    cut,
    exchange_replaced,
    in_master_dtype,
    mark_state_dicts,
    sharded_in,
)
from shardproof.zero.optim.trial import Verdict, dealing, tried
from shardproof.zero.ranks.invariants import WATCHED_STEPS, Pairs
from shardproof.zero.ranks.written import BITS
from shardproof.zero.tensors.parameter import ShardedParameter, by_engine, written_on

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine

# Class names (lower case) of optimizers that need whole parameters, some of them only from a later step on.
_PER_PARAMETER = re.compile(
    "muon|shampoo|soap|adafactor|lamb(?!da)|lars|novograd|galore|came(?!l)|sm3|apollo|adam_?mini|dion|kron|psgd|"
    "adamp|sgdp|nero|fromage"
)
# And those whose update depends on other parameters.
_ACROSS_PARAMETERS = re.compile("lbfgs|prodigy|dadapt|kfac|hessianfree|lorafa")
log = logging.getLogger("shardproof.zero")


def first_elements(optimizer: Optimizer) -> dict[int, int]:
    """Inside a step: by identity of a slice in `param_groups`, the element of its flattened parameter with which it
    begins. Tensors that are not slices are left out."""
    swap = optimizer.__dict__.get("_shardproof_swap")
    return {id(local): p.flat.range_in_parameter(p.index)[0] for p, local in swap.pairs} if swap is not None else {}


def _named(optimizer: Optimizer, words: re.Pattern[str]) -> bool:
    return any(words.search(cls.__name__.lower()) for cls in type(optimizer).__mro__)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a wrapper, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def judged(optimizer: Optimizer) -> Verdict:
    """Which parameters need to be updated whole, on the ranks that own them: by the optimizer's name, or by a trial. An
    attribute `elementwise` of the optimizer, or such a key in a group, takes precedence."""
    if type(optimizer).__module__.startswith("accelerate."):
        optimizer = unwrapped(optimizer)
    said = getattr(optimizer, "elementwise", None)
    if said is False or (said is None and _named(optimizer, _PER_PARAMETER)):
        return Verdict(frozenset(range(len(optimizer.param_groups))))
    # bitsandbytes' others are element-wise, apart from rounding 8-bit state in blocks.
    known = type(optimizer).__module__.startswith(("torch.optim.", "bitsandbytes."))
    return Verdict() if known or said else tried(optimizer)


def updated_whole(optimizer: Optimizer) -> set[int]:
    """The identities of those parameters. `elementwise` in a group says that it has none, or all, for example where one
    optimizer is Muon for matrices and AdamW for the rest."""
    wanted = judged(optimizer).whole
    groups = [g for number, g in enumerate(optimizer.param_groups) if not g.get("elementwise", number not in wanted)]
    return {id(p) for group in groups for p in group["params"]}


def owned_here(optimizer: Optimizer) -> set[int] | None:
    """The identities of the parameters whose state this rank keeps; None if every rank has state for each."""
    params = [p for p in sharded_in(optimizer) if p.flat.engine.sharded]
    whole = updated_whole(optimizer)
    owned = [p for p in params if id(p) in whole]
    if not owned:
        return None
    groups = by_engine(owned).values()
    mine = {id(p) for here, owners in zip(groups, map(Owners, groups), strict=True) for p in here if owners.mine(p)}
    return mine | {id(p) for p in params if id(p) not in whole}


def _check_by_parameter(optimizer: Optimizer, params: list[ShardedParameter]) -> None:
    if "sparseadam" in type(optimizer).__name__.lower():
        raise EngineError(
            f"{type(optimizer).__name__} wants sparse gradients, and gradients are dense once they are reduced "
            f"('{params[0].qualified_name}'). Use Adam or AdamW, and leave out sparse=True of the embedding."
        )
    cut = [p for p in params if p.flat.engine.sharded]
    if cut and (collective := dealing(optimizer)):
        raise EngineError(
            f"{type(optimizer).__name__} deals parameters out to ranks itself (its step calls {collective}), and so do "
            "stages 1 to 3. Use its form for one device (SingleDeviceMuon, torch.optim.Muon), or stage 0."
        )
    across = _named(optimizer, _ACROSS_PARAMETERS) or type(optimizer).__name__.lower().endswith("sam")
    # Of SAM only `step(closure)` comes here; its two calls see whole parameters.
    if cut and (across or judged(optimizer).across):
        raise EngineError(
            f"{type(optimizer).__name__} needs all parameters at once, but at stage {cut[0].flat.engine.stage} each "
            f"rank holds a slice of '{cut[0].qualified_name}' and its state. Use stage 0 with this optimizer, or "
            "another one (AdamW, SGD, Muon, Adafactor ...)."
        )


def _warn_if_untried(optimizer: Optimizer, params: list[ShardedParameter], closure: bool) -> None:
    """Warn once that an unknown optimizer will see slices."""
    if optimizer.__dict__.get("_shardproof_steps") or not any(p.flat.engine.sharded for p in params):
        return
    verdict = judged(optimizer)
    was_tried = "_shardproof_tried" in optimizer.__dict__  # without the closure
    reason = verdict.untried or ("it is given a closure" if closure and was_tried and not verdict.whole else "")
    if reason and params[0].flat.engine.comm.rank == 0:
        log.warning(
            "%s is not known to be element-wise and could not be tried (%s): its step sees a slice of each parameter "
            "on each rank. If its update of one element depends on others (norms, matrices), set its attribute "
            "`elementwise` to False, and it sees whole parameters; True if not.",
            *(type(optimizer).__name__, reason),
        )


def _check_the_same(engine: Engine, optimizer: Optimizer, pairs: Pairs) -> None:
    """Raise DesyncError if ranks step different parameters: each rank has to update its part of all. All ranks are
    here."""
    places = hash(tuple((p.flat.index, p.index) for p, _ in pairs)) & BITS
    if not all(engine.comm.agree([places])):
        raise DesyncError(
            f"{type(optimizer).__name__} does not step the same parameters on all ranks: {len(pairs)} on rank "
            f"{engine.comm.rank}. Each rank updates its part of every parameter, so the optimizer of each has to have "
            "all of them. What deals them out to ranks (ZeroRedundancyOptimizer) is not needed: stages 1 to 3 do that. "
            "Optimizers of one parameter each (Pyro's) have to step in one order, and that of a set differs."
        )


class _Swap:
    """The parameters of one optimizer, replaced by their slices during a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pairs: Pairs = []
        self.slices: list[Slices] = []
        self.owned: list[tuple[Owners, list[tuple[ShardedParameter, torch.Tensor]], dict[int, torch.Tensor]]] = []
        self.lists: list[list[torch.Tensor]] = []  # of each group its parameters
        self.first: list[tuple[Engine, Pairs, list[tuple[bool, int]]]] = []

    def enter(self, params: list[ShardedParameter] | None = None) -> None:
        optimizer = self.optimizer
        params = sharded_in(optimizer) if params is None else params
        engines = by_engine(params)
        for engine in engines:
            engine.before_step()
            engine.written.note_step(optimizer)
            engine.unfinished = self.abandon
        for name in ("grad_scale", "found_inf"):  # a fused step on the host would read them while they are copied
            told = optimizer.__dict__.get(name)
            if isinstance(told, torch.Tensor) and any(p.flat.device.type == "cpu" for p in params):
                setattr(optimizer, name, told.cpu())
        whole = updated_whole(optimizer) if any(engine.sharded for engine in engines) else set()
        local_of = self._gather_whole([p for p in params if p.flat.engine.sharded and id(p) in whole])
        for flat, members in itertools.groupby(params, key=attrgetter("flat")):
            here = Slices(flat, [p for p in members if id(p) not in local_of])
            self.slices.append(here)
            local_of.update(zip(map(id, here.params), here.locals, strict=True))
        self.pairs = [(p, local_of[id(p)]) for p in params]
        for p, local in self.pairs:
            if len(p.__dict__) > 2:  # more than every parameter has
                local.__dict__.update(written_on(p))
                p.flat.engine.note_written_on(p)
        self._exchange_state(whole)
        # Not every optimizer skips parameters without a gradient, so those that another rank updates are left out.
        elsewhere = {id(p) for p, local in self.pairs if local is p.stand_in and local.grad is None}
        for group in optimizer.param_groups:
            self.lists.append(group["params"])
            group["params"] = [local_of.get(id(p), p) for p in group["params"] if id(p) not in elsewhere]

    def _exchange_state(self, whole: set[int]) -> None:
        """Key the state by slices during the step, except for parameters that are updated `whole`."""
        state = self.optimizer.state
        stepped = self.optimizer.__dict__.get("_shardproof_steps")
        for p, local in self.pairs if state else ():
            if (known := state.pop(p, None)) is not None:
                known = known if stepped else in_master_dtype(p, known)
                state[local] = beside(p, known if id(p) in whole else cut(known, p))

    def _gather_whole(self, params: list[ShardedParameter]) -> dict[int, torch.Tensor]:
        """The stand-in of each parameter: the whole with its gradient on its owner, an empty one elsewhere."""
        stand_ins: dict[int, torch.Tensor] = {}
        for here in by_engine(params).values():
            owners = Owners(here)
            for p in here:  # one for all steps: an optimizer may keep state of its own beside torch's
                if p.stand_in is None or p.stand_in.dtype != p.flat.shard.dtype:
                    p.stand_in = torch.empty(0, dtype=p.flat.shard.dtype, device=p.flat.device)
                stand_ins[id(p)] = p.stand_in
            moving = [p for p in here if p.flat.has_grad[p.index] and p.flat.grad is not None]
            for dtype in dict.fromkeys(p.flat.shard.dtype for p in moving):
                slices = [(p, p.flat.locals[p.index].view(-1)) for p in moving if p.flat.shard.dtype == dtype]
                values = owners.bring(slices)
                gradients = owners.bring([(p, p.flat.local_of(p.flat.grad, p.index)) for p, _ in slices])  # type: ignore[arg-type]
                for p, _ in slices:
                    if (value := values.get(id(p))) is not None:
                        stand_in = stand_ins[id(p)]
                        stand_in.data, stand_in.grad = value, gradients[id(p)]
                        values[id(p)] = stand_in
                self.owned.append((owners, slices, values))
        return stand_ins

    def watch(self) -> None:
        """In its first steps, check that the optimizer does its job."""
        steps = self.optimizer.__dict__.get("_shardproof_steps", 0)
        overflow = self.optimizer.__dict__.get("found_inf")  # a fused optimizer is told by GradScaler, and does nothing
        if steps < WATCHED_STEPS and overflow is not None and bool(overflow):
            return
        self.optimizer.__dict__["_shardproof_steps"] = steps + 1
        if steps >= WATCHED_STEPS:
            return
        engines = by_engine(p for p, _ in self.pairs)
        outside = self.optimizer.__dict__.setdefault("_shardproof_outside", Outside())
        (outside.before_next if steps else outside.before_first)(next(iter(engines)), self.optimizer)
        for engine in engines:
            pairs = [(p, local) for p, local in self.pairs if p.flat.engine is engine]
            _check_the_same(engine, self.optimizer, pairs)
            engine.invariants.note_update(self.optimizer, pairs)
            if steps == 0 and not getattr(self.optimizer, "rounds_by_chance", False):
                self.first.append((engine, pairs, engine.invariants.before_step(self.optimizer, pairs)))

    def leave(self, complete: bool = True) -> None:
        optimizer = self.optimizer
        for owners, slices, values in self.owned:
            if complete:
                owners.take_back(slices, values)
            for p, _ in slices:
                p.flat.changed(p.index)
        for group, params in zip(optimizer.param_groups, self.lists, strict=False):
            group["params"] = params
        for p, local in self.pairs if optimizer.state else ():
            if (state := optimizer.state.pop(local, None)) is not None:
                optimizer.state[p] = state
                if p.flat.home is not None:
                    p.flat.home.keep_state(state, local.numel())
        changed = [(here.flat, here.take_back()) for here in self.slices]
        for flat, indices in changed:
            if indices:
                flat.changed(*indices)
        for value in (value for _, _, values in self.owned for value in values.values()):
            value.data, value.grad = value.new_empty(0), None
        for engine in by_engine(p for p, _ in self.pairs):
            engine.unfinished = None
            engine.after_step()
        self.pairs, self.slices, self.owned, self.lists = [], [], [], []

    def abandon(self) -> None:
        """The step raised an exception, and the program goes on."""
        if self.optimizer.__dict__.get("_shardproof_swap") is self:
            del self.optimizer.__dict__["_shardproof_swap"]
        self.leave(complete=False)


def with_modes(optimizer: Optimizer) -> None:
    """[Note: optimizers with modes]

    ScheduleFree's `train()` and `eval()` move parameters by its state outside of a step, where parameters are whole and
    state belongs to slices. So these methods get slices, too: from the first step of the instance on, or from the
    loading of a checkpoint, as there is no state before.
    """
    optimizer = unwrapped(optimizer)
    for name, training in (("train", True), ("eval", False)):
        method = getattr(type(optimizer), name, None)
        if callable(method):
            optimizer.__dict__[name] = functools.partial(_change_mode, optimizer, method, training)


def _change_mode(optimizer: Optimizer, method: Callable[[Any], Any], training: bool) -> Any:
    if all(group.get("train_mode") is training for group in optimizer.param_groups):  # asked before each micro-batch
        return method(optimizer)
    swap = _Swap(optimizer)
    swap.enter()
    try:
        return method(optimizer)
    finally:
        swap.leave()


def _around_closure(swap: _Swap, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure computes with whole parameters, even in the middle of a step."""

    def run() -> Any:
        swap.leave()
        try:
            return closure()
        finally:
            swap.enter()

    return run


def _enter(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    params = sharded_in(optimizer)
    if not params:
        return None
    _check_by_parameter(optimizer, params)
    if _named(optimizer, _ACROSS_PARAMETERS):  # it may have kept its parameters, and computes with those
        for engine in by_engine(params):
            engine.before_step()
        return None
    closure = (len(args) > 1 and callable(args[1])) or callable(kwargs.get("closure"))
    _warn_if_untried(optimizer, params, closure)
    mark_state_dicts(optimizer)
    with_modes(optimizer)
    check_loaded(optimizer, params)
    swap = optimizer.__dict__["_shardproof_swap"] = _Swap(optimizer)
    swap.enter(params)
    swap.watch()
    if len(args) > 1 and callable(args[1]):
        return (args[0], _around_closure(swap, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _around_closure(swap, kwargs["closure"])}
    return None


def _leave(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    swap = optimizer.__dict__.pop("_shardproof_swap", None)
    if swap is not None:
        for engine, pairs, before in swap.first:
            engine.invariants.after_step(optimizer, pairs, before)
        if swap.first:
            optimizer.__dict__["_shardproof_outside"].after_first(swap.first[0][0])
        swap.leave()


_HOOK: Any = "shardproof"  # where torch has a number


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the swap the last thing before a step and the first after it, so that users' hooks see parameters."""
    unfinished = optimizer.__dict__.get("_shardproof_swap")
    if unfinished is not None:  # the last step ended in an exception
        unfinished.abandon()
    before: Any = optimizer._optimizer_step_pre_hooks  # of torch, and in order
    after: Any = optimizer._optimizer_step_post_hooks
    if _HOOK not in before:
        exchange_replaced(optimizer)
        if not sharded_in(optimizer):
            return
    before[_HOOK], after[_HOOK] = _outside_dynamo(_enter), _outside_dynamo(_leave)
    before.move_to_end(_HOOK)
    after.move_to_end(_HOOK, last=False)


def _outside_dynamo(hook: Any) -> Any:
    """`torch.compile(optimizer.step)` compiles what lies between our hooks."""
    return _disabled(hook) if "torch._dynamo" in sys.modules else hook


_disabled = functools.cache(torch.compiler.disable)


# Torch's public hook on every optimizer; it does nothing where no parameter is sharded.
register_optimizer_step_pre_hook(_before_step)
