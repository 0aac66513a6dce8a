"""The record of a model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CAUSAL = "AutoModelForCausalLM"  # the transformers class for models that write answers
PARTS = ("llm", "vision", "audio", "aligner", "talker")
MEDIA = ("image", "audio", "video")
TALKER, UNUSED, THINKER = "talker", "unused", "thinker"
FED_BY = {"vision": ("image", "video"), "audio": ("audio",), "aligner": MEDIA}  # the files that reach these parts


@dataclass(frozen=True)
class Grounding:
    """How a family writes the name and the location of an object in an image, as ms-swift's templates do.

    Attributes:
        name: a format with the name at `{}`.
        box: a format with the numbers at `{points}`, (x1,y1),(x2,y2), or at `{list}`, [x1, y1, x2, y2].
        pixels: whether they are pixels of the image as resized by the processor; otherwise thousandths of its sides.
    """

    name: str
    box: str
    pixels: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models, in terms of transformers' own classes. Paths are those of `named_modules()`.

    Attributes:
        name: as shown by `shardproof models`.
        model_types: the values of `model_type` in config.json.
        model_class: the transformers class to load.
        parts: for each of PARTS that the family has, its modules. If one is inside another (an aligner in a tower), the
            deeper path counts.
        blocks: the lists of repeated layers. Each layer is a unit.
        dynamic: modules that only some rows use. Each is a unit, without the layers in it.
        unused: modules whose weights no training step reaches. They are kept and saved, but never trained. Layers of a
            tower after the config's `vision_feature_layer` are unused without being listed here.
        processor: the class of the processor for images and audio; none for text models.
        media: the kinds of files that rows may hold besides text.
        trains: the module whose forward is trained, if it is not the model's own.
        speech: modules that exist only with audio output.
        files: files of a model folder besides weights, config and processor.
        codes: what the talker is trained on: `one` code per step, or `groups` of codes; empty if it cannot be trained.
        own_code: the classes are in the model's folder, and their code runs only if the user allows it.
        marks: the marks of files in a text, for processors that take one row at a time and do not say where they put
            files (see `row_by_row.py`).
        takes_data: whether forward takes its inputs in one dict.
        grounding: how it writes objects and their locations; None if ms-swift has no special form for it.
    """

    name: str
    model_types: tuple[str, ...]
    model_class: str
    parts: Mapping[str, tuple[str, ...]]
    blocks: tuple[str, ...]
    dynamic: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    processor: str | None = None
    media: tuple[str, ...] = ()
    trains: str = ""
    speech: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    codes: Literal["", "one", "groups"] = ""
    own_code: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    takes_data: bool = False
    grounding: Grounding | None = None
