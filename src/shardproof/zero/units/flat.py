"""Flat: parameters of one unit, their gathered values and their gradients."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch

from shardproof.errors import StaleWeightsError
from shardproof.zero.autograd import in_backward, unshard
from shardproof.zero.comm.pending import Pending
from shardproof.zero.device import address_of, storage_uses
from shardproof.zero.tensors.parameter import ShardedParameter
from shardproof.zero.units.accumulated import Accumulated
from shardproof.zero.units.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardproof.zero.schedule.engine import Engine
    from shardproof.zero.schedule.home import Home
    from shardproof.zero.units.unit import Unit


class Flat(Accumulated):
    """Parameters of one unit that share dtype and trainability, of which each rank holds a part.

    Attributes:
        shard: this rank's part in master dtype, 1-D; the whole buffer where nothing is sharded.
        home: where shard and gradient live, if not on the computing device (schedule/home.py). `source`: in that case,
            a copy of the shard in `dtype` that gathers send, with its version; on the device or at home.
        dtype: the dtype of computing (differs from `shard.dtype` under mixed precision).
        whole: the gathered buffer in `dtype`, or None; `gathering` while it is under way.
        kept: a full-size buffer that contains the shard, or None; see [Note: one copy].
        minor: takes little memory, and therefore stays gathered until its values change; see schedule/room.py.
        standing: the gathered buffer where it stays; see standing.py.
        open_views: while the unit's forward runs, the plain tensors that stand in for the parameters. `open_at`: their
            addresses; `open_versions`, `open_changes`: their versions, and `versions`, when the forward began.
            `edited`: those that a forward was found to edit in a way that no version counts (`p.data.mul_`).
        versions: how often each parameter's value has changed.
    """

    def __init__(
        self,
        engine: Engine,
        unit: Unit,
        index: int,
        names: list[str],
        values: list[torch.Tensor],
        requires_grad: bool,
        dtype: torch.dtype,
    ) -> None:
        self.engine, self.unit, self.index, self.names, self.dtype = engine, unit, index, names, dtype
        comm, shapes = engine.comm, [tuple(value.shape) for value in values]
        super().__init__(shapes, dtype, *((comm.shards, comm.shard_rank) if engine.sharded else (1, 0)))
        self.requires_grad = [requires_grad] * len(names)
        self.home = self.find_home()
        self.versions = [0] * len(names)
        self.version, self.minor = 0, False
        self.edited: set[int] = set()
        self._reset_transient()

    def _reset_transient(self) -> None:
        self.whole: torch.Tensor | None = None
        self.standing = Standing(self)
        self.source: tuple[int, torch.Tensor] | None = None
        self.whole_version = -1
        self.whole_edits = 0
        self.gathering: Pending | None = None
        self.gather_position, self.prefetched = -1, False
        self.open_views: list[torch.Tensor] | None = None
        self.open_at: list[int] = []
        self.open_versions: list[int] = []
        self.open_changes: list[int] = []

    # --- this rank's values ---------------------------------------------------------------------------

    def set_shard(self, shard: torch.Tensor) -> None:
        """Take `shard` as this rank's values; only shape, dtype and device of the graph's leaf matter."""
        self.place(shard)
        if self.home is not None:
            self.home.settle()
        differentiable = shard.is_floating_point() or shard.is_complex()
        leaf = shard if self.home is None and self.kept is None else self.zeros(1).expand(shard.shape)
        self.leaf = leaf.detach().requires_grad_(differentiable)
        self.standing.show_anew()

    def place(self, shard: torch.Tensor, apart: bool = False) -> None:
        """Store the values (`apart`: in memory of their own), and derive the slices that the optimizer works on.

        [Note: one copy]
        At stages 1 and 2 gathered values stay until the step, so this rank's part would exist twice. Therefore the
        shard is that part of the gathered buffer, unless it has another dtype (a finer master) or lives elsewhere.
        """
        self.kept = None
        if not apart and self.keeps(shard.dtype):
            with torch.inference_mode(False):
                self.kept = torch.empty(self.numel, dtype=self.dtype, device=shard.device)
                shard = self.part_of(self.kept).copy_(shard.detach())
        self.shard, self.source = shard, None
        self.locals = [local.data for local in self.locals_of(shard)]  # each counts its own changes
        self._own_uses = 0 if self.kept is None else storage_uses(self.kept.untyped_storage())

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether a shard in `dtype` can be a part of the gathered buffer."""
        return self.engine.sharded and not self.engine.frugal and self.home is None and dtype == self.dtype

    def before_change(self) -> None:
        """Called before values change: edits through views are taken over, and views of the gathered buffer that
        somebody holds keep their present values."""
        self.engine.absorb_edits(self)
        if self.home is not None:
            self.home.settle()
        if self.kept is not None and self.engine.unfinished is None:  # a stepping optimizer holds slices of it
            gathered = self.whole is not None and address_of(self.whole) == address_of(self.kept)
            own = self._own_uses + gathered + self.standing.uses_of(self.kept)
            if storage_uses(self.kept.untyped_storage()) > own:
                self.place(self.shard)

    def take_in_edits(self) -> None:
        """The values are about to be read: take over edits through views. Not those of views of dropped buffers in the
        middle of a backward pass, as they count as changes, which its graph would refuse."""
        if not in_backward():
            self.engine.copies.take_in_values()
        self.engine.absorb_edits(self)

    def buffer(self) -> torch.Tensor:
        """A buffer to gather into, with a version counter of its own, as somebody may hold views of the last one."""
        return self.engine.pool.take(self.numel, self.dtype) if self.kept is None else self.kept.data

    def make_parameters(self) -> list[ShardedParameter]:
        self.params = [ShardedParameter.wrap(self, i, self.dtype, r) for i, r in enumerate(self.requires_grad)]
        return self.params

    # --- home ---------------------------------------------------------------------------------------

    def find_home(self) -> Home | None:
        """Where the shard and its gradient are to live, if not on the computing device."""
        home = self.engine.home
        return home if home is not None and (home.frozen or any(self.requires_grad)) else None

    @property
    def device(self) -> torch.device:
        """The device of the shard."""
        return self.engine.comm.device if self.home is None else self.home.device

    def settled(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A shard-sized tensor in `dtype` where the shard lives; itself if it is there."""
        if self.home is None:
            return values.to(dtype)
        if values.requires_grad:  # a gradient that is part of a graph
            return values.to(self.device, dtype)
        return self.home.place(values, dtype)

    def gather(self, whole: torch.Tensor, tag: int) -> Pending:
        """Start gathering into `whole`. A shard that lives elsewhere is fetched while the device computes."""
        with nullcontext() if self.home is None else self.home.incoming():
            return self.engine.comm.gather(whole, self.to_send(), tag)

    def gather_alone(self) -> None:
        """Where nothing is sharded: this rank holds everything, in another dtype or place."""
        if self.home is None:
            again = self.standing.to_fill()
            with torch.no_grad():
                self.whole = self.shard.to(self.dtype) if again is None else again.copy_(self.shard)
            return
        with self.home.incoming():
            self.whole = self.to_send()
            self.gathering = Pending([self.home.arrival()], self.whole)

    def to_send(self) -> torch.Tensor:
        """This rank's part on the computing device, in `dtype`: what a gather sends."""
        if self.home is None:
            return self.shard.to(self.dtype)
        if not self.engine.frugal:  # otherwise it is gathered several times per step
            return self.home.bring(self.shard, self.dtype)
        if self.source is None or self.source[0] != self.version:
            self.source = None  # its memory may be taken again
            make = self.home.cast if self.home.frozen else self.home.bring
            self.source = self.version, make(self.shard, self.dtype)
        return self.home.bring(self.source[1], self.dtype) if self.home.frozen else self.source[1]

    @property
    def sent(self) -> torch.Tensor:
        """What the next gather reads from where the shard lives."""
        if self.source is None or self.source[0] != self.version or self.source[1].device != self.device:
            return self.shard
        return self.source[1]

    def at_work(self, values: torch.Tensor) -> torch.Tensor:
        """Shard-sized values on the computing device."""
        return values.to(self.engine.comm.device)

    def zeros(self, numel: int) -> torch.Tensor:
        """On the computing device, in master dtype."""
        return torch.zeros(numel, dtype=self.shard.dtype, device=self.engine.comm.device)

    def take_over(self, index: int, values: torch.Tensor) -> None:
        """Take over this rank's slice of a whole parameter (any dtype) where it differs from the master in that dtype;
        elsewhere the master, which is finer, stays as it is."""
        master = self.locals[index].view(-1)
        new = self.slice_of(values, index).to(self.device)
        with torch.no_grad():
            differs = master.to(new.dtype) != new
            master[differs] = new[differs].to(master.dtype)
        self.source = None

    def plain_views(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Parameters in the gathered buffer. To autograd these are not views, so that editing them in place under
        no_grad is allowed and counted."""
        if self.engine.stands:
            return self.standing.views(indices)
        return [self.view(self.gathered, i).data for i in indices]

    def show(self) -> None:
        """A forward begins: provide the plain tensors that it sees in place of the parameters."""
        views = self.standing.shown_before()
        if views is None:
            indices = range(len(self.names))
            # As with a parameter, requires_grad of these does not depend on the current grad mode.
            views = unshard(self, indices) if any(self.requires_grad) else self.plain_views(indices)
            self.open_at = [view.data_ptr() for view in views]
            self.standing.keep(views)
        self.open_views = views
        self.open_versions = [view._version for view in views]
        self.open_changes = self.versions.copy()

    # --- state ----------------------------------------------------------------------------------

    @property
    def fresh(self) -> bool:
        """Whether the gathered buffer exists and holds the present values."""
        return self.whole_version == self.version and self.whole is not None

    @property
    def gathered(self) -> torch.Tensor:
        """The gathered buffer of an acquired flat."""
        return cast("torch.Tensor", self.whole)

    def changed(self, *indices: int) -> None:
        """The values of these parameters have changed; gathered copies are stale."""
        for index in indices:
            self.versions[index] += 1
        self.engine.written.note_changed(self, indices)
        self.version += len(indices)
        self.engine.changes += len(indices)
        if self.engine.stands:
            self.standing.changed(indices)

    def check_version(self, index: int, version: int) -> None:
        if self.versions[index] != version:
            raise StaleWeightsError(
                f"The weights of '{self.names[index]}' were changed between the forward pass that used them and "
                "its backward pass (an optimizer step, or an edit in place). Run backward before the step, or run "
                "the forward pass again after it."
            )

    def set_requires_grad(self, index: int, flag: bool) -> None:
        """Freeze or unfreeze. The parameter keeps its place; frozen ranges are reduced as zeros."""
        self.requires_grad[index] = flag
        self.standing.show_anew()
        master = self.engine.master_dtype(self.shard.dtype, flag)
        stays = self.home is not None or self.find_home() is None  # parameters that were trained at home stay there
        if master != self.shard.dtype or not stays:
            self.before_change()
            self.home = self.home or self.find_home()
            self.set_shard(self.settled(self.shard, master))
            self.grad_dtype = self.engine.reduce_dtype(self)
            self.engine.announce(self)
            self.version += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Flat:
        self.take_in_edits()
        copy = object.__new__(Flat)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        for name in ("requires_grad", "versions", "edited"):
            setattr(copy, name, getattr(self, name).copy())
        copy.without_gradients()  # as with plain parameters
        copy.gradient_hooks, copy.post_hooks = {}, {}
        copy._reset_transient()
        copy.set_shard(self.settled(self.shard.detach().clone(), self.shard.dtype))
        for old, new in zip(self.params, copy.make_parameters(), strict=True):
            new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in ("flat", "index")})
            memo[id(old)] = new
            if old.flat.requires_grad[old.index]:
                new.listen()
        copy.engine, copy.unit = deepcopy(self.engine, memo), deepcopy(self.unit, memo)
        copy.engine.announce(copy)
        return copy
