"""What a model's processor is given beside a text, and what is made of what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.data.encoding.learnt import Spans
from shardproof.data.forms.parts import Problem
from shardproof.data.media.reading import Frames


def as_taken(videos: Sequence[Frames], processor: Any) -> dict[str, Any]:
    """What a processor of videos has to know where their frames are taken already: to take all, and when they were."""
    known = {"video_metadata": [video.metadata for video in videos], "return_metadata": True}  # some write its times
    ours = {"do_sample_frames": False, "stack_frames": 1, **known}
    taken = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return {name: value for name, value in ours.items() if name in taken}


def share_names(processor: Any) -> bool:
    """Whether what pictures become has the names of what videos become (SmolVLM's): of both one is left."""
    parts = (type(getattr(processor, f"{kind}_processor", None)) for kind in ("image", "video"))
    images, videos = (set(getattr(part, "model_input_names", ())) for part in parts)  # our part for videos has none
    return bool(images & videos)


def for_a_model(made: Any) -> Any:
    """What a processor has made, without what is about its videos alone, and without half precision (Llama 4's): who
    computes in it casts what comes."""
    made.pop("video_metadata", None)
    for name, value in made.items():
        if str(getattr(value, "dtype", "")) in ("torch.bfloat16", "torch.float16"):
            made[name] = value.float()
    return made


def listed(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def check_seen(replaced: Sequence[Any]) -> None:
    """Raise Problem for a file that the processor puts no token in the place of."""
    for change in replaced:
        if not change["replacement"]:
            raise Problem("a file is too small or too short for this model: it becomes no tokens")


def after_replacement(text: str, spans: Spans, replaced: Sequence[Any]) -> tuple[str, Any]:
    """The text with each placeholder grown to what the processor put in its place, and the spans in that text."""
    pieces, last = [], 0
    for change in replaced:
        start, end = change["span"]
        pieces += [text[last:start], change["replacement"]]
        last = end
    grown = "".join([*pieces, text[last:]])

    def moved(at: int) -> int:
        return at + sum(len(c["replacement"]) - (c["span"][1] - c["span"][0]) for c in replaced if c["span"][1] <= at)

    return grown, [(moved(start), moved(end), *weight) for start, end, *weight in spans]
