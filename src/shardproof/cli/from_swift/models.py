"""What is known about the model of an ms-swift command, from its name or the config in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shardproof.train.model.lacking import OF_SWIFT

# Model families that take more than text, by name. If a text-only model matches, nothing can be frozen, and its run
# reports it; if a family is missing here, its towers would be trained silently.
_SEEING = re.compile(
    r"omni|audio|vision|multimodal|(^|[-_/.\d])vl|qvq|ocr|[-_/](asr|tts)|glm-[\d.]*v|glm-edge-v|autoglm|glyph|cog(agent|vlm)"
    r"|llava|intern-?vl|intern-s|xcomposer|minicpm-?(o|v|llama)|(?<!embedding)gemma-?[34]|(med|pali|diffusion)gemma"
    r"|qwen3\.[5-9]|kimi-k(2\.[5-9]|3)|minimax-m3|mimo-v2\.5|llama-?4|(mistral-small|ministral)-3|pixtral|ovis|emu3|janus"
    r"|florence|idefics|molmo|owl|mineru|ui-tars|valley|muse-glimmer|midasheng|uembed|reranker-m0"
)


def looks_or_hears(model: str) -> bool:
    """Whether a model takes more than text, according to the config in its folder or its name."""
    return _has_parts(_config_of(model)) or bool(_SEEING.search(model.lower()))


# Differing defaults of ms-swift for how much of a file is used, by a pattern of the name; the first match counts.
_TAKEN = (
    (r"qwen3[-_]vl[-_]embedding", {"max_image_tokens": "1800", "fps": "1", "max_frames": "64"}),
    (r"qwen3[-_]vl[-_]reranker", {"max_image_tokens": "1280", "fps": "1", "max_frames": "64"}),
    (r"qwen[^/]*(vl|omni)|qvq|qwen3\.[5-9]|(keye|mimo)-vl", {"fps": "2", "max_frames": "768"}),
)
_SAME_BOUND = {"max_image_tokens": "max_pixels"}


def against_vllm(options: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Why vLLM cannot answer for a command here, although it can in ms-swift."""
    given = {name: " ".join(values) for name, values in options}
    if given.get("infer_backend", "").lower() != "vllm":
        return []
    if folder := given.get("adapters") or given.get("ckpt_dir"):
        merged = f"{folder.rstrip('/')}-merged"
        return [
            f"--infer-backend vllm: it takes full models only; run 'shardproof export {folder} {merged}' and use the "
            "result"
        ]
    if (model := given.get("model", "")) and looks_or_hears(model):
        return [f"--infer-backend vllm: it supports text only, and {model} takes files, too; leave it out"]
    return []


def taken_of_files(model: str, given: Collection[str]) -> dict[str, str]:
    """How much ms-swift uses of files by default, as our options, without those that are given."""
    taken = next((options for fits, options in _TAKEN if re.search(fits, model.lower())), {})
    return {name: value for name, value in taken.items() if not {name, _SAME_BOUND.get(name)} & {*given}}


def with_files(values: dict[str, list[str]], notes: list[str]) -> None:
    """Add these options to those of a run."""
    values |= {name: [value] for name, value in taken_of_files(values["model"][0], values).items()}
    if "max_seconds" not in values:
        notes.append(
            "audio or video of more than a minute makes a bad row, unlike in ms-swift: --max-seconds N allows more"
        )


def without_parts(values: dict[str, list[str]], given: Collection[str], notes: list[str]) -> None:
    """Leave out options about parts that a text model lacks; ms-swift ignores them."""
    config = _config_of(values.get("model", [""])[0])
    if not config or _has_parts(config):
        return
    for option, theirs in OF_SWIFT.items():
        if option in values and not {*given}.isdisjoint(theirs):
            said = f"--{option.replace('_', '-')} {' '.join(values.pop(option))}"
            notes.append(f"{said} is left out: {values['model'][0]} is a text model without such parts")


def _has_parts(config: dict[str, Any]) -> bool:
    return any(re.search("vis|vit|aud|image|thinker", name) for name in config)


def longest(model: str) -> int | None:
    """The context length of the model in a folder, from its config."""
    config = _config_of(model)
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _config_of(model: str) -> dict[str, Any]:
    """The config of a model folder; empty if there is none."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
