"""How an engine belongs to its model: it knows it weakly.

[Note: what belongs to the model]
The model holds its engine, and what holds modules: the builder. The engine knows these weakly, as graphs hold the
engine, and modules may hold graphs (a loss of its own that a layer keeps, a weight that a hook computes): through the
graph Python sees no circle, and a model that nobody has any more would stay, with its shards and what it has gathered.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardproof.zero.schedule.room import MakesRoom
from shardproof.zero.tensors.parameter import OURS

if TYPE_CHECKING:
    from shardproof.zero.build import Builder


class ShownViews(dict[int, list[torch.Tensor]]):
    """What forwards show again, by index of flat; see [Note: shown again] in standing.py. A copy of a model begins
    without any.

    Attributes:
        allowed: whether there may be any; None: to be found out.
    """

    allowed: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownViews:
        return ShownViews()


class BelongsToModel(MakesRoom):
    """The part of the engine that knows the model.

    Attributes:
        model: what is sharded, for as long as somebody has it.
        builder: cuts what was attached to the model since. It needs an engine: who makes an engine makes both.
        shown: what forwards show again; empty when the model is gone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._builder = weakref.ref(model), cast("weakref.ref[Builder]", lambda: None)
        self.shown = ShownViews()

    @property
    def model(self) -> nn.Module:
        return cast("nn.Module", self._model())

    @property
    def builder(self) -> Builder:
        return cast("Builder", self._builder())

    @builder.setter
    def builder(self, builder: Builder) -> None:
        self.model.__dict__["_shardproof_builder"] = builder
        self._builder = weakref.ref(builder)

    @property
    def shown(self) -> ShownViews:
        views = self._shown()
        if views is None:
            views = ShownViews()
            views.allowed = False
        return views

    @shown.setter
    def shown(self, views: ShownViews) -> None:
        self.model.__dict__["_shardproof_shown"] = views
        self._shown = weakref.ref(views)

    def may_show_again(self) -> bool:
        """Whether views may stay with their nodes of the graph: nothing leads from a parameter to the model."""
        if self.shown.allowed is None:
            hooked = any(flat.gradient_hooks or flat.post_hooks for flat in self.flats)
            leads = hooked or any(_leads_on(p) for flat in self.flats for p in flat.params)
            self.shown.allowed = not self.sharded and not leads
        return self.shown.allowed

    def forget_shown(self) -> None:
        """A parameter has got a hook, or there are more parameters."""
        self.shown.clear()
        self.shown.allowed = None

    def note_written_on(self, p: torch.Tensor) -> None:
        """Somebody has written something on a parameter."""
        if self.shown and _leads_on(p):
            self.forget_shown()


def _leads_on(p: torch.Tensor) -> bool:
    """Whether what was written on a parameter may lead to something else, and at last to the model."""
    return any(gc.is_tracked(value) for name, value in p.__dict__.items() if name not in OURS)
