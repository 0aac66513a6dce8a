"""How an engine belongs to its model: it knows it weakly.

[Note: what belongs to the model]
The model holds its engine, and what holds modules: the builder. The engine knows these weakly, as graphs hold the
engine, and modules may hold graphs (a loss of its own that a layer keeps, a weight that a hook computes): through the
graph Python sees no circle, and a model that nobody has any more would stay, with its shards and what it has gathered.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from torch import nn

from shardproof.zero.schedule.room import MakesRoom

if TYPE_CHECKING:
    from shardproof.zero.build import Builder


class BelongsToModel(MakesRoom):
    """The part of the engine that knows the model.

    Attributes:
        model: what is sharded, for as long as somebody has it.
        builder: cuts what was attached to the model since. It needs an engine: who makes an engine makes both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._builder = weakref.ref(model), cast("weakref.ref[Builder]", lambda: None)

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
