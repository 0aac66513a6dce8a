"""From a plain model to units: which modules are units, what lies in which flat buffer, on which device."""

from __future__ import annotations

import fnmatch
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import UninitializedParameter

from shardproof.errors import EngineError
from shardproof.zero.checks import READER, check_unwrapped
from shardproof.zero.optim.state import replace
from shardproof.zero.ranks.invariants import on_any_rank
from shardproof.zero.ranks.same_model import check_same_model
from shardproof.zero.schedule.engine import Engine
from shardproof.zero.tensors.parameter import ShardedParameter, ShardedValue
from shardproof.zero.units.flat import Flat
from shardproof.zero.units.unit import Slot, Unit

Places = dict[int, tuple[nn.Parameter, Unit, list[tuple[nn.Module, str, str]]]]

# A parameter of the root with so many elements (an embedding, a head) has a flat buffer of its own: the gradient of
# the head, the first that backward computes, is on its way while the blocks work, not at the very end.
LARGE = 1 << 20

_PLAIN = nn.Parameter, ShardedValue  # the latter is what `nn.Parameter(p.data)` makes of a sharded one
UnitChoice = Sequence["type[nn.Module] | str"] | None


def find_units(model: nn.Module, choice: UnitChoice) -> list[tuple[str, nn.Module]]:
    """The modules that are gathered as one, in the order of the model.

    Args:
        choice: module classes, class names, or patterns of module names (`model.layers.*`); None finds the
            repeated blocks: classes that the model lists in `_no_split_modules`, else the children of its
            longest `nn.ModuleList`s that do not lie inside another one.
    """
    named = [(name, module) for name, module in model.named_modules() if module is not model]
    if choice is not None:
        return _chosen_units(named, choice)
    classes = {str(c) for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    found = _outermost((n, m) for n, m in named if type(m).__name__ in classes)
    if found:
        return found
    lists = _outermost((n, m) for n, m in named if isinstance(m, nn.ModuleList))
    sizes = [len(m) for _, m in lists]  # type: ignore[arg-type]
    if (longest := max(sizes, default=0)) < 2:
        return []
    lists = [pair for pair, size in zip(lists, sizes, strict=True) if 2 * size >= longest and size > 1]
    prefixes = tuple(f"{n}." for n, _ in lists)
    return [
        (n, m)
        for n, m in named
        if n.startswith(prefixes) and n.rpartition(".")[0] in {x for x, _ in lists} and [*m.parameters()]
    ]


def _chosen_units(named: list[tuple[str, nn.Module]], choice: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    if isinstance(choice, (str, type)):
        choice = [choice]
    if not isinstance(choice, Iterable) or not all(isinstance(wanted, (str, type)) for wanted in choice):
        raise EngineError(f"units={choice!r} is not a list of module classes, class names or name patterns.")
    found: dict[int, tuple[str, nn.Module]] = {}
    for wanted in choice:
        if isinstance(wanted, type):
            hits = [(n, m) for n, m in named if isinstance(m, wanted)]
        else:
            hits = [(n, m) for n, m in named if fnmatch.fnmatchcase(n, wanted) or type(m).__name__ == wanted]
        if not hits:
            kinds = Counter(type(m).__name__ for _, m in named)
            raise EngineError(
                f"units={wanted!r} matches no module. The model's most frequent classes are "
                f"{', '.join(f'{k} ({c})' for k, c in kinds.most_common(5))}; a name pattern looks like "
                f"'{named[len(named) // 2][0] if named else 'layers.*'}'."
            )
        found.update((id(m), (n, m)) for n, m in hits)
    return [pair for pair in named if id(pair[1]) in found]


def _outermost(pairs: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    result: list[tuple[str, nn.Module]] = []
    for name, module in pairs:
        if not any(name.startswith(f"{outer}.") for outer, _ in result):
            result.append((name, module))
    return result


# --- cutting --------------------------------------------------------------------------------------


Children = tuple["weakref.ref[nn.Module]", dict[str, nn.Module | None], int]  # of a list of modules, at the last look


def _children_of(module: nn.Module) -> Children:
    return weakref.ref(module), module._modules, len(module._modules)


def _has_slot(p: ShardedParameter, module: nn.Module, name: str) -> bool:
    return any(slot.module() is module and slot.name == name for slot in p.flat.unit.slots)


class _Registered:
    """A hook of torch's on all registrations. That of a builder which is gone stays until the next one is made: garbage
    is collected at any time, also while torch goes through these hooks, when none may be removed."""

    def __init__(self, builder: Builder) -> None:
        self.builder = weakref.ref(builder)

    def __call__(self, module: nn.Module, name: str, value: Any) -> Any:
        builder = self.builder()
        return None if builder is None else builder.note(module, name, value)


class Builder:
    """Cuts the plain parameters of a model into units: at `shard`, and again for what is attached later.

    Attributes:
        attached: whether something is known to be there that no unit has.
        modules: those of the model, by identity, which Python gives to others when one is gone.
        registered: where modules and parameters were registered in the model since the last look, by module and name.
        lists: the lists of modules, and what they held at the last look.
        kind: the class of the model at the last look.
        altered: whether any were, ever: the parameters of units may be others than those of the model then.
    """

    def __init__(self, engine: Engine, choice: UnitChoice) -> None:
        self.engine, self.choice, self.kind = engine, choice, type(engine.model)
        self.attached, self.altered = False, False
        self.registered: list[tuple[nn.Module, str]] = []
        self.modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.lists: list[Children] = []
        self._watch_registrations()

    def for_copy(self, engine: Engine, memo: dict[int, Any]) -> Builder:
        """The builder of a deep copy of the model."""
        copy = Builder(engine, self.choice)
        copy.modules.update((id(m), m) for m in (deepcopy(m, memo) for m in self.engine.model.modules()))
        here = [module for ref, _, _ in self.lists if (module := ref()) is not None]
        copy.lists = [(weakref.ref(deepcopy(m, memo)), {}, 0) for m in here]  # which have no children yet
        copy.altered = self.altered
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Builder | None:
        return memo.get(id(self)) if deepcopy(self.engine, memo) is not None else None

    def _watch_registrations(self) -> None:
        hook = _Registered(self)
        for register in (
            nn_module.register_module_module_registration_hook,
            nn_module.register_module_parameter_registration_hook,
        ):
            hooks: dict[int, Any] = register(hook).hooks_dict_ref()  # type: ignore[assignment]
            for number in [n for n, h in hooks.items() if isinstance(h, _Registered) and h.builder() is None]:
                del hooks[number]

    def note(self, module: nn.Module, name: str, value: Any) -> torch.Tensor | None:
        """Something is being registered, anywhere. Returns what is to be registered in its place, or None."""
        if self.modules.get(id(module)) is module:
            self.registered.append((module, name))
            self.altered = True
        elif isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            return self.shown_as(value)
        return None

    def has_more(self) -> bool:
        """Whether a parameter is there that no unit has. What is gone again (PEFT parametrizes experts for as long as
        they run) need not be taken in: ranks that ran something else would have to meet for nothing."""
        if type(self.engine.model) is not self.kind:  # as by `fully_shard`, which registers nothing
            check_unwrapped(self.engine.model)
            self.kind = type(self.engine.model)
        for i, (ref, children, size) in enumerate(self.lists):  # what is inserted is not registered
            module = ref()
            if module is not None and (module._modules is not children or len(children) != size):
                self.lists[i] = _children_of(module)
                self.registered += [(module, name) for name in module._modules]
                self.altered = True
        places, self.registered = self.registered, []
        for module, name in places:
            child = module._modules.get(name)
            inside = [module] if child is None else list(child.modules())
            names = [(m, n) for m in inside for n in m._parameters] if child is not None else [(module, name)]
            self.attached |= sum(self._is_new(m, n) for m, n in names) > 0  # each of them is asked
            self.modules.update((id(m), m) for m in inside)
        return self.attached

    def _is_new(self, module: nn.Module, name: str) -> bool:
        p = module._parameters.get(name)
        if isinstance(p, ShardedParameter):
            return not _has_slot(p, module, name)
        if p is None or id(p) in self._shown():
            return False
        if not isinstance(p, nn.Parameter):  # `functional_call` lends it: to be looked at when that is over
            self.registered.append((module, name))
        return isinstance(p, nn.Parameter)

    def _shown(self) -> set[int]:
        """In mid-forward, the plain tensors that stand in place of the parameters of open units."""
        return {id(view) for flat in self.engine.flats for view in flat.open_views or ()}

    def shown_as(self, value: Any) -> torch.Tensor | None:
        """What `value` is a copy of without its graph: `self.prompts[1:]` is a list of its own, which makes parameters
        of what are none, and in mid-forward those of open units are none."""
        views = (view for flat in self.engine.flats for view in flat.open_views or () if view.numel())
        return next((v for v in views if v.data_ptr() == value.data_ptr() and v.shape == value.shape), None)

    def build(self) -> None:
        """Make units of everything that is still plain. Every rank must call it with the same model."""
        engine, model = self.engine, self.engine.model
        self.attached, first = False, not engine.units
        if first:
            engine.units.append(Unit(engine, "root", 0))
        else:
            engine.meet("take in what was attached to the model")
        unit_of = {id(m): unit for unit in engine.units[1:] for m in unit.entries}
        for name, module in find_units(model, self.choice if first else self._classes()):
            if id(module) not in unit_of and any(type(p) in _PLAIN for p in module.parameters()):
                unit = unit_of[id(module)] = Unit(engine, name, len(engine.units))
                engine.units.append(unit)
                unit.watch(module)
        places = self._places(unit_of)
        check_same_model(engine, places, first)
        if first:
            for buffer in model.buffers():
                buffer.copy_(engine.comm.broadcast(buffer.detach().contiguous().clone()))
        self._cut(places)
        engine.forget_shown()
        self._watch_root(unit_of)
        engine.fit_room()
        self._remember()

    def _remember(self) -> None:
        modules = list(self.engine.model.modules())
        self.modules = weakref.WeakValueDictionary((id(m), m) for m in modules)
        self.lists = [_children_of(m) for m in modules if isinstance(m, (nn.ModuleList, nn.Sequential))]

    def _classes(self) -> UnitChoice:
        """At a later build: what is of the class of a present unit is a unit too."""
        present = {type(m) for unit in self.engine.units[1:] for m in unit.entries}
        here = {type(m) for m in self.engine.model.modules()}
        return sorted(present & here, key=str)

    def _places(self, unit_of: dict[int, Unit]) -> Places:
        """For each plain parameter the unit that owns it and all its places. Shared by units: the root's."""
        root = self.engine.root
        found: Places = {}
        seen: set[int] = set()
        shown = self._shown()

        def walk(module: nn.Module, prefix: str, unit: Unit) -> None:
            unit = unit_of.get(id(module), unit)
            if id(module) in seen:
                return
            seen.add(id(module))
            for name, p in module._parameters.items():
                if isinstance(p, ShardedParameter):
                    self._add_slot(p, module, name)
                elif p is not None and id(p) not in shown and self._can_cut(p, prefix + name, module, name):
                    _, owner, places = found.setdefault(id(p), (p, unit, []))
                    places.append((module, name, prefix + name))
                    if owner is not unit:
                        found[id(p)] = (p, root, places)
            for name, child in module._modules.items():
                if child is not None:
                    walk(child, f"{prefix}{name}.", unit)

        walk(self.engine.model, "", root)
        return found

    def _add_slot(self, p: ShardedParameter, module: nn.Module, name: str) -> None:
        if p.flat.engine is self.engine and not _has_slot(p, module, name):
            p.flat.unit.slots.append(Slot(module, name, p.flat, p.index))

    def _can_cut(self, p: nn.Parameter, full_name: str, module: nn.Module, name: str) -> bool:
        if isinstance(p, UninitializedParameter):
            raise EngineError(f"'{full_name}' is not initialised yet. Run one forward pass before shardproof.shard.")
        if type(p) in _PLAIN:
            return True
        if p.requires_grad and isinstance(p, nn.Parameter):  # else `functional_call` lends it
            raise EngineError(
                f"'{full_name}' is a {type(p).__name__}, a kind of parameter that cannot be cut into slices, and it "
                "is trainable. Freeze it, or replace it with a plain nn.Parameter."
            )
        if p.device != self.engine.comm.device:  # packed formats (quantised bases) stay whole on each rank
            module._parameters[name] = p.to(self.engine.comm.device)  # type: ignore[assignment]
        return False

    def _cut(self, places: Places) -> None:
        groups: dict[tuple[int, bool, torch.dtype, int], list[Any]] = {}
        for place, (p, unit, where) in enumerate(places.values()):
            alone = 1 + place if unit.is_root and p.numel() >= LARGE else 0
            groups.setdefault((unit.index, p.requires_grad, p.dtype, alone), []).append((p, where))
        new: list[tuple[ShardedParameter, torch.Tensor | None]] = []
        order = sorted(groups.items(), key=lambda group: (group[0][0], not group[0][1]))
        for (unit_index, requires_grad, dtype, _), members in order:
            flat = self._make_flat(self.engine.units[unit_index], members, requires_grad, dtype)
            for (p, where), made in zip(members, list(flat.params), strict=True):
                grad, p.grad = p.grad, None
                new.append((self._replace(p, made, where), grad))
        self.engine.pool.forget()
        self._adopt_gradients(new)

    def _make_flat(self, unit: Unit, members: list[Any], requires_grad: bool, dtype: torch.dtype) -> Flat:
        engine = self.engine
        compute = dtype if engine.precision is None or not dtype.is_floating_point else engine.precision.compute
        values = [p.detach() for p, _ in members]
        names = [where[0][2] for _, where in members]
        index = sum(len(u.flats) for u in engine.units)
        flat = Flat(engine, unit, index, names, values, requires_grad, compute)
        with torch.no_grad():
            readers = {i: p.__dict__[READER] for i, (p, _) in enumerate(members) if READER in p.__dict__}
            here = {i: value for i, value in enumerate(values) if i not in readers}
            master = engine.master_dtype(dtype, requires_grad)
            flat.set_shard(flat.settled(self._first_values(flat, here, master), master))
            for i, read in readers.items():
                first, last = flat.range_in_parameter(i)
                if last > first:
                    value = read(first, last)
                    eight = value.is_floating_point() and value.element_size() == 1  # torch promotes it to nothing
                    wider = eight or torch.promote_types(value.dtype, dtype) == dtype  # rounding changes nothing then
                    flat.locals[i].view(-1).copy_(value if wider else value.to(dtype))
        flat.grad_dtype = engine.reduce_dtype(flat)
        flat.make_parameters()
        unit.flats.append(flat)
        engine.announce(flat)
        return flat

    def _first_values(self, flat: Flat, values: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The shard of `flat` with these values, by index, and zeros elsewhere."""
        comm = self.engine.comm
        if not values:
            return torch.zeros(flat.shard_numel, dtype=dtype, device=comm.device)
        if self.engine.sharded:
            whole = comm.pool.take(flat.numel, dtype)  # the same for all blocks
        else:
            whole = torch.empty(flat.numel, dtype=dtype, device=comm.device)
        for i, value in values.items():
            flat.view(whole, i).copy_(value)
        flat.zero_rest(whole, set(values))
        comm.broadcast(whole)  # ranks that were initialised differently start equal all the same
        return flat.part_of(whole).clone() if self.engine.sharded else whole

    def _replace(self, p: nn.Parameter, made: ShardedParameter, where: list[Any]) -> ShardedParameter:
        """Turn the object `p` itself into the sharded parameter, so that an optimizer made before keeps it."""
        flat, index = made.flat, made.index
        made.__dict__.update({k: v for k, v in p.__dict__.items() if k not in {READER, *made.__dict__}})
        made.take_over(p)
        if isinstance(p, ShardedValue):
            p.flat.engine.copies.forget(p)
        try:
            torch.utils.swap_tensors(p, made)
            result: ShardedParameter = p  # type: ignore[assignment]
        except RuntimeError:  # see `Replaced`
            result = made
            replace(p, result)
        flat.params[index] = result
        if flat.requires_grad[index]:
            result.listen()
        for module, name, _ in where:
            module._parameters[name] = result
            flat.unit.slots.append(Slot(module, name, flat, index))
            if give_whole_tensors not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(give_whole_tensors)
        return result

    def _adopt_gradients(self, new: list[tuple[ShardedParameter, torch.Tensor | None]]) -> None:
        """Gradients from before the cut become their mean over ranks."""
        comm = self.engine.comm
        anywhere = on_any_rank(comm, [grad is not None for _, grad in new])
        for (p, grad), used in zip(new, anywhere, strict=True):
            if used:
                grad = torch.zeros(p.shape, dtype=p.dtype, device=comm.device) if grad is None else grad.detach()
                p.grad = comm.total(grad.to(comm.device).clone()).div_(self.engine.divisor)

    def _watch_root(self, unit_of: dict[int, Unit]) -> None:
        """The root opens with the model and with every module around blocks (`model.model(...)`)."""
        root, model = self.engine.root, self.engine.model
        entered = {id(m) for m in root.entries}
        unit_names = [n for n, m in model.named_modules() if id(m) in unit_of]
        around = {n.rsplit(".", i)[0] for n in unit_names for i in range(1, n.count(".") + 1)}
        for name, module in model.named_modules():
            if any(name == u or name.startswith(f"{u}.") for u in unit_names):
                continue
            wanted = module is model or (name in around and not isinstance(module, (nn.ModuleList, nn.ModuleDict)))
            if wanted and id(module) not in entered:
                root.watch(module)


def give_whole_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: user code that asks for a state dict on all ranks gets whole, plain tensors."""
    for key, value in state_dict.items():
        if isinstance(value, ShardedValue) and not isinstance(value, nn.Parameter):
            whole = value.whole().detach().clone()
            state_dict[key] = value.flat.engine.copies.of_entry(whole, value.flat, value.index)
