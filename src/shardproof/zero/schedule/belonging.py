"""How an engine belongs to its model: by weak references.

[Note: what belongs to the model]
The model holds its engine, and the builder, which holds modules. The engine refers to both weakly: graphs hold the
engine, and modules may hold graphs (a layer that keeps its own loss, a weight computed by a hook). Python's garbage
collector cannot follow a cycle through a graph, so a model that nobody refers to any more would stay in memory, with
its shards and gathered buffers.
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
    """Views that forwards reuse, by index of flat; see [Note: shown again] in standing.py. A copy of a model starts
    without any.

    Attributes:
        allowed: whether views may be kept; None: not known yet.
    """

    allowed: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownViews:
        return ShownViews()


class BelongsToModel(MakesRoom):
    """The part of the engine that knows the model.

    Attributes:
        model: the sharded model, as long as somebody holds it.
        builder: shards parameters that are attached to the model later. It needs an engine: code that makes an engine
            makes both.
        shown: views that forwards reuse; empty when the model is gone.
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
        """Whether views may be kept with their graph nodes: nothing leads from a parameter to the model."""
        if self.shown.allowed is None:
            hooked = any(flat.gradient_hooks or flat.post_hooks for flat in self.flats)
            leads = hooked or any(_leads_on(p) for flat in self.flats for p in flat.params)
            self.shown.allowed = not self.sharded and not leads
        return self.shown.allowed

    def forget_shown(self) -> None:
        """A parameter has got a hook, or the model has more parameters."""
        self.shown.clear()
        self.shown.allowed = None

    def note_written_on(self, p: torch.Tensor) -> None:
        """An attribute of a parameter was set."""
        if self.shown and _leads_on(p):
            self.forget_shown()


def _leads_on(p: torch.Tensor) -> bool:
    """Whether an attribute of a parameter may lead to other objects, and possibly to the model."""
    return any(gc.is_tracked(value) for name, value in p.__dict__.items() if name not in OURS)
