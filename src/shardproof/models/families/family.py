"""What a model family is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CAUSAL = "AutoModelForCausalLM"  # the class of transformers that loads what writes answers
PARTS = ("llm", "vision", "audio", "aligner", "talker")
MEDIA = ("image", "audio", "video")
TALKER, UNUSED, THINKER = "talker", "unused", "thinker"
FED_BY = {"vision": ("image", "video"), "audio": ("audio",), "aligner": MEDIA}  # files that reach these parts


@dataclass(frozen=True)
class Grounding:
    """How a family writes the name of a thing in a picture, and where it is, as ms-swift's templates do.

    Attributes:
        name: with the name at `{}`.
        box: with the numbers at `{points}`, (x1,y1),(x2,y2), or at `{list}`, [x1, y1, x2, y2].
        pixels: whether they are pixels of the picture as the processor resizes it; else thousandths of its sides.
    """

    name: str
    box: str
    pixels: bool = False


@dataclass(frozen=True)
class Family:
    """One family of models, in the names of transformers' own classes. Paths are those of `named_modules()`.

    Attributes:
        name: as `shardproof models` shows it.
        model_types: what `model_type` in config.json says.
        model_class: the class of transformers that is loaded.
        parts: for each of PARTS that the family has, the modules it consists of. Where one lies in another (an aligner
            in a tower), the deeper path counts.
        blocks: the lists of repeated layers. Each layer is a unit.
        dynamic: modules that only some rows use. Each is a unit, without the layers in it.
        unused: modules whose weights no training step reaches. They are kept, saved, and never trained. Layers of a
            tower behind `vision_feature_layer` of the config are such without being named here.
        processor: the class of what turns images and sounds into tensors; none for models of text.
        media: what rows may hold besides text.
        trains: the module whose forward is trained, where it is not the model's own.
        speech: modules that are there only with audio output.
        files: what a model folder holds besides weights, config and processor.
        codes: what the talker is trained on: `one` code a step, or `groups` of codes; empty where it cannot be.
        own_code: the classes lie in the model's folder, and their code runs only where the user allows it.
        marks: what stands for a file in a text, for processors that take rows one by one and do not say where they put
            files (see `row_by_row.py`).
        takes_data: whether forward takes its inputs in one dict.
        grounding: how it writes what is where in a picture; None where ms-swift has no form of its own for it.
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
