"""A model packed, from what it computes before to what it computes when it is read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardproof.errors import ConfigError
from shardproof.integrations.four_bits import whole
from shardproof.train.packing.calibrated import calibrate
from shardproof.train.packing.files import pack_folder
from shardproof.train.packing.kinds import Packing
from shardproof.train.packing.measured import Measured, at_work, measure
from shardproof.train.packing.places import places_in, sampled, take_samples
from shardproof.train.packing.rows import batches_of

APART = 0.5  # how far weights that are read again may be from what was packed, relative to them: four bits leave 0.1


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        layers: how many linear layers; of experts each one counts.
        size_before: of all weights, in bytes.
        calibrated: with how many rows.
        moved: how far the logits of some tokens are from those before, relative to the largest of these.
        before, after: what the rows gave, if there are any.
    """

    kind: str
    layers: int
    size_before: int
    calibrated: int
    moved: float
    before: Measured | None
    after: Measured | None


class Packer:
    """Packs one model. Making one looks at its layers and reads the rows; nothing is written before `pack`.

    Args:
        recorded: the options of the run that it is of, if any.
        folder: what it was loaded from.
        pooling: how it makes vectors of texts, if it is asked for vectors, so that rows have no loss.

    Raises:
        ConfigError, DataError: it cannot be packed so, or the rows cannot be used.
    """

    def __init__(
        self,
        model: Any,
        processing: Any,
        packing: Packing,
        recorded: dict[str, Any],
        folder: Path,
        pooling: str | None,
    ) -> None:
        self.packing, self.places, self._rounded = packing, places_in(model, packing), {}
        self._before: Measured | None = None
        self._pooling = pooling or "last"
        self.calibrated = 0

        def rows(files: tuple[str, ...]) -> Any:
            return (
                batches_of(files, packing, recorded, folder, model, processing, pooling is not None) if files else None
            )

        calibrating = rows(packing.dataset)
        self.rows = rows(packing.val_dataset) or calibrating
        if self.rows is not None:
            self._before = measure(model, self.rows, self._pooling)
        if packing.calibrates:
            self.calibrated = calibrating.drawn
            with at_work(model) as device:
                self._rounded = calibrate(model, self.places, calibrating.on(device), packing)
        take_samples(model, self.places)

    def pack(self, folder: Path, dtype: torch.dtype) -> None:
        """Pack the plain weights in a folder, which are of this dtype."""
        self.size_before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        pack_folder(folder, self.places, self.packing, self._rounded, dtype)

    def check(self, model: Any, moved: float, folder: Path) -> Packed:
        """Compare the model that was read from the folder, and has computed something.

        Raises:
            ConfigError: it is another one, or computes nothing.
        """
        name, apart = self._farthest(model)
        if not apart < APART:
            raise ConfigError(
                f"{folder} does not reproduce the packed weights: {name} has a relative error of {apart:.2g}."
                " It has been kept for inspection."
            )
        after = measure(model, self.rows, self._pooling) if self.rows is not None else None
        if moved != moved or (after is not None and not after.found.isfinite().all()):
            raise ConfigError(
                f"Packed by --quantize {self.packing.kind}, the model computes NaN. {folder} has been kept for"
                f" inspection.\nUse another --quantize, or leave layers unpacked with --keep."
            )
        kind, layers = self.packing.kind, len(self.places.packed)
        return Packed(kind, layers, self.size_before, self.calibrated, moved, self._before, after)

    def _farthest(self, model: Any) -> tuple[str, float]:
        """The weight that is farthest from what it was, by some of its columns, and how far."""
        found = "", 0.0
        for name, before in self.places.samples.items():
            apart = float((_sample(model, name) - before).norm() / before.norm().clamp_min(1e-30))
            if not apart <= found[1]:
                found = name, apart
        return found


def _sample(model: Any, name: str) -> torch.Tensor:
    weight = model.get_parameter(name)
    state = getattr(weight, "quant_state", None)
    if state is not None:
        weight = whole(weight.data, state)
    return sampled(weight)
