"""Arguments for a model's processor besides texts, and handling of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.data.encoding.learnt import Spans
from shardproof.data.forms.parts import Problem
from shardproof.data.media.reading import Frames


def as_taken(videos: Sequence[Frames], processor: Any) -> dict[str, Any]:
    """The arguments that tell a video processor that frames were already sampled: to use all of them, and their
    times."""
    known = {"video_metadata": [video.metadata for video in videos], "return_metadata": True}  # some write these times
    ours = {"do_sample_frames": False, "stack_frames": 1, **known}
    taken = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return {name: value for name, value in ours.items() if name in taken}


def share_names(processor: Any) -> bool:
    """Whether the tensors of images and videos have the same names (SmolVLM's), so that one would overwrite the
    other."""
    parts = (type(getattr(processor, f"{kind}_processor", None)) for kind in ("image", "video"))
    images, videos = (set(getattr(part, "model_input_names", ())) for part in parts)  # our own video part has none
    return bool(images & videos)


def for_a_model(made: Any) -> Any:
    """A processor's output without the metadata of videos, and with float32 instead of half precision (Llama 4's): code
    that computes in half precision casts its inputs."""
    made.pop("video_metadata", None)
    for name, value in made.items():
        if str(getattr(value, "dtype", "")) in ("torch.bfloat16", "torch.float16"):
            made[name] = value.float()
    return made


def listed(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def check_seen(replaced: Sequence[Any]) -> None:
    """Raise Problem for a file that the processor replaces with no token at all."""
    for change in replaced:
        if not change["replacement"]:
            raise Problem("a file is too small or too short for this model: it becomes no tokens")


def after_replacement(text: str, spans: Spans, replaced: Sequence[Any]) -> tuple[str, Any]:
    """The text with each placeholder expanded as the processor did it, and the spans in that text."""
    pieces, last = [], 0
    for change in replaced:
        start, end = change["span"]
        pieces += [text[last:start], change["replacement"]]
        last = end
    grown = "".join([*pieces, text[last:]])

    def moved(at: int) -> int:
        return at + sum(len(c["replacement"]) - (c["span"][1] - c["span"][0]) for c in replaced if c["span"][1] <= at)

    return grown, [(moved(start), moved(end), *weight) for start, end, *weight in spans]
