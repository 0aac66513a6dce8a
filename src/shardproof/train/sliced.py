"""Pictures of MiniCPM-V in a form that TRL's GRPO and RLOO can deal out.

These trainers shuffle and split what a processor makes of pictures, by names that they know. MiniCPM-V cuts a picture
into slices of any size, lays the patches of all slices side by side and says in `target_sizes` where each slice ends: a
name that they do not know. Here a patch is a row, and rows are counted for each picture in `image_grid_thw`, as Qwen's
are. The size of its slice stands at the end of each row, so that the rows of any pictures, in any order, can be laid
out again before the model sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import ProcessorMixin as Base
else:
    Base = object

CHANNELS = 3
SIZES = "target_sizes"
OF_PICTURES = (
    *("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask", "spatial_shapes"),
)


class InRows(Base):
    """In front of a processor's class."""

    _slices: list[int]

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        found = super()._process_images(images, **kwargs)
        self._slices = list(found[0]["num_patches_per_image"])
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # It pads unless it is told not to, and TRL takes every token that it gets for one of the prompt.
        made = super().__call__(*args, **{"padding": False, "return_tensors": None, **kwargs})
        if SIZES in made:
            made["pixel_values"], made["image_grid_thw"] = to_rows(
                torch.as_tensor(made["pixel_values"]), torch.as_tensor(made.pop(SIZES)), self._slices
            )
        return made


class OfSomeRows(Base):
    """In front of a processor's class: rows without pictures have None or nothing in TRL, which some do not take, and
    conversations have another name there."""

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        return super().apply_chat_template(conversation, *args, **kwargs)

    def __call__(self, images: Any = None, **kwargs: Any) -> Any:
        if isinstance(images, list):
            images = [pictures or [] for pictures in images] if any(images) else None
        return super().__call__(images=images, **kwargs)


@functools.cache
def _before(front: Any, kind: Any) -> type[Any]:
    return type(kind.__name__, (front, kind), {"__module__": kind.__module__})


def of_some_rows(processor: Any) -> Any:
    """Have this processor (a copy that is the caller's) take rows without pictures as TRL gives them."""
    kind: Any = type(processor)
    processor.__class__ = _before(OfSomeRows, kind)
    return processor


def cuts_pictures(processor: Any) -> bool:
    """Whether this is a processor whose pictures are slices of many sizes."""
    names = getattr(getattr(processor, "image_processor", None), "model_input_names", ())
    return SIZES in names and hasattr(processor, "_process_images")


def with_rows(processor: Any) -> Any:
    """Have this processor (a copy that is the caller's) make rows."""
    kind: Any = type(processor)
    processor.__class__ = _before(InRows, kind)
    return processor


def to_rows(pixels: torch.Tensor, sizes: torch.Tensor, slices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches as rows.

    Args:
        pixels: (1, channels, patch, patches x patch).
        sizes: (slices of all pictures, 2), in patches.
        slices: how many there are of each picture.

    Returns: rows (patches, channels x patch x patch + 2), and (pictures, 3) whose product is the rows of a picture.
    """
    patch = pixels.shape[2]
    patches = pixels[0].unflatten(-1, (-1, patch)).permute(2, 0, 1, 3).flatten(1)
    counts = sizes.prod(-1)
    ends = torch.repeat_interleave(sizes.to(patches), counts, dim=0)
    rows = torch.stack([group.sum() for group in counts.split(slices)])
    return torch.cat([patches, ends], dim=1), torch.stack([torch.ones_like(rows), rows, torch.ones_like(rows)], dim=1)


def from_rows(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model takes; nothing where there are no pictures."""
    if not len(rows):
        return {}
    sizes, at = [], 0
    while at < len(rows):
        sizes.append(rows[at, -2:].to(torch.int32))
        at += int(sizes[-1].prod())
    patches = rows[:, :-2]
    patch = round((patches.shape[1] / CHANNELS) ** 0.5)
    pixels = patches.view(len(rows), CHANNELS, patch, patch).permute(1, 2, 0, 3).flatten(2)
    return {"pixel_values": pixels.unsqueeze(0), SIZES: torch.stack(sizes)}


def laid_out(fields: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the model in which rows, if there are any, are pictures again."""
    if "image_grid_thw" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name not in ("image_grid_thw", "pixel_values")}
    return rest | from_rows(torch.as_tensor(fields["pixel_values"]))


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the model, without those of pictures where there is none: TRL cuts them off a batch of some."""
    pixels = fields.get("pixel_values")
    if pixels is None or len(pixels):
        return fields
    return {name: value for name, value in fields.items() if name not in OF_PICTURES}


def listen(model: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> RemovableHandle:
    """Have the model see its inputs changed; with the handle as a context, inside it."""
    return model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, change(kwargs)), prepend=True, with_kwargs=True
    )
