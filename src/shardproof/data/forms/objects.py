"""Objects in images and their locations: ms-swift's `objects`, checked when a record is read.

Turns whose texts have placeholders for objects keep the objects for them, in order, under `PLACED`, until
`grounding.py` writes them into the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardproof.data.forms.parts import Problem, parts_of, text_of, with_files
from shardproof.data.forms.written import read_out

OBJECTS = "objects"  # the field of a record
PLACED = "objects of the text"  # the key of a turn

PLACE = re.compile(r"<(ref-object|bbox)>")


class Box(NamedTuple):
    """The corners of a box, or a point: x, y, x, y or x, y.

    Attributes:
        picture: the index of the image in the row, from 0.
        real: whether the numbers are pixels of the original image file; otherwise they are fractions of its sides.
    """

    numbers: tuple[float, ...]
    picture: int
    real: bool


def placed(record: Mapping[str, Any], messages: list[dict[str, Any]], spare: bool = False) -> list[dict[str, Any]]:
    """The turns with the files and objects of a record in their places.

    Args:
        spare: whether there may be more objects than placeholders, as for a question whose answer is generated.

    Raises:
        Problem: as for `with_files`; or the objects are malformed, or their number differs from that of the
            placeholders.
    """
    messages = with_files(record, messages)
    if not record.get(OBJECTS):
        return messages
    found = [PLACE.findall(text_of(message["content"])) for message in messages]
    if not any(found):
        return messages
    objects = _checked(record[OBJECTS], pictures=sum(1 for _ in parts_of(messages, "image")))
    for kind, (field, things) in objects.items():
        places = sum(kinds.count(kind) for kinds in found)
        if places > len(things) or (places < len(things) and not spare):
            raise Problem(f"there are {places} <{kind}> in the texts, and {len(things)} in '{OBJECTS}.{field}'")
    waiting = {kind: iter(things) for kind, (_, things) in objects.items()}
    return [
        {**message, PLACED: [next(waiting[kind]) for kind in kinds]} if kinds else message
        for message, kinds in zip(messages, found, strict=True)
    ]


def check_filled(
    record: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    where: str = "a plain text or a rejected answer",
) -> None:
    """Raise Problem for object placeholders in turns that `placed` has not processed, which would be learned as text;
    `where` describes these turns."""
    unseen = "".join(text_of(turn["content"]) for turn in messages if PLACED not in turn)
    if record.get(OBJECTS) and (place := PLACE.search(unseen)):
        raise Problem(
            f"{place[0]} refers to '{OBJECTS}' in {where}, where none are filled in: write it as the model does"
        )


def _checked(objects: Any, pictures: int) -> dict[str, tuple[str, list[Any]]]:
    """For each placeholder, the field of its kind of object, and the objects in it."""
    objects = read_out(objects)
    if not isinstance(objects, dict):
        raise Problem(f"'{OBJECTS}' must be an object with 'ref' and 'bbox'")
    if not pictures:
        raise Problem(f"the row has '{OBJECTS}' but no image for them")
    refs, boxes = _listed(objects, "ref"), _listed(objects, "bbox")
    if not all(isinstance(ref, str) for ref in refs):
        raise Problem(f"'{OBJECTS}.ref' must be a list of texts")
    kind = objects.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise Problem(f"'{OBJECTS}.bbox_type' must be 'real' (pixels) or 'norm1' (0 to 1), not {kind!r:.40}")
    of = _listed(objects, "image_id") or [0] * len(boxes)
    if len(of) != len(boxes) or not all(type(i) is int and 0 <= i < pictures for i in of):
        raise Problem(
            f"'{OBJECTS}.image_id' must give the image of each of {len(boxes)} boxes, from 0 to {pictures - 1}"
        )
    made = [Box(_numbers(box, i, kind == "real"), of[i], kind == "real") for i, box in enumerate(boxes)]
    return {"ref-object": ("ref", refs), "bbox": ("bbox", made)}


def _listed(objects: Mapping[str, Any], field: str) -> list[Any]:
    value = objects.get(field)
    if value is not None and not isinstance(value, list):
        raise Problem(f"'{OBJECTS}.{field}' must be a list")
    return value or []


def _numbers(box: Any, index: int, real: bool) -> tuple[float, ...]:
    """The numbers of a box, the upper left corner first, as in ms-swift."""
    most = math.inf if real else 1
    if not isinstance(box, list) or len(box) not in (2, 4) or not all(_is_number(x) and 0 <= x <= most for x in box):
        numbers = "pixels, 0 or more" if real else "numbers from 0 to 1 (norm1)"
        raise Problem(f"'{OBJECTS}.bbox[{index}]' must be [x1, y1, x2, y2] or a point [x, y], {numbers}")
    xs, ys = sorted(box[::2]), sorted(box[1::2])
    return tuple(number for point in zip(xs, ys, strict=True) for number in point)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
