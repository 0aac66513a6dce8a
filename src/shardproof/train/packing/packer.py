"""Packs a model, and compares what it computes before with what the reloaded model computes."""

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

APART = 0.5  # largest allowed relative difference between reloaded and original weights: four bits give 0.1


@dataclass(frozen=True)
class Packed:
    """The result of packing a model.

    Attributes:
        layers: how many linear layers, counting each expert's.
        size_before: size of all weights in bytes.
        calibrated: how many rows were used for calibration.
        moved: how far the logits of some tokens are from those before packing, relative to the largest of those.
        before, after: the results for the rows, if there are any.
    """

    kind: str
    layers: int
    size_before: int
    calibrated: int
    moved: float
    before: Measured | None
    after: Measured | None


class Packer:
    """Packs one model. Creating a Packer inspects the layers and reads the rows; nothing is written before `pack`.

    Args:
        recorded: the options of the model's run, if any.
        folder: where the model was loaded from.
        pooling: how the model turns texts into vectors, if it is an embedding model, whose rows have no loss.

    Raises:
        ConfigError, DataError: the model cannot be packed like this, or the rows cannot be used.
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
        """Pack the plain weights in a folder, which have this dtype."""
        self.size_before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        pack_folder(folder, self.places, self.packing, self._rounded, dtype)

    def check(self, model: Any, moved: float, folder: Path) -> Packed:
        """Compare the model that was reloaded from the folder, after a forward pass.

        Raises:
            ConfigError: its weights differ, or it computes NaN.
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
        """The weight that differs most from the original, judged by some of its columns, and by how much."""
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
