"""ms-swift's options for a Ray cluster."""

from __future__ import annotations

import json
import re

from shardproof.cli.from_swift.missing import INSTEAD, is_on, missing


def launcher(values: list[str]) -> list[tuple[str, list[str]]]:
    """`--use_ray true`."""
    on = is_on(values)
    return [("launcher", ["ray"])] if on else []


def processes(values: list[str]) -> list[tuple[str, list[str]]]:
    """`--device_groups` with one group of training processes; rlhf models on separate devices are not supported."""
    text = " ".join(values)
    try:
        said = json.loads(text)
        (group,) = (group for name, group in said.items() if name != "nproc_per_node")
        if group["workers"] != ["default"] or group.get("device", "GPU").lower() not in ("gpu", "cuda"):
            raise ValueError(text)
        return [("nproc", [str(_count(group["ranks"]))])]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise missing(f"--device-groups {text}", INSTEAD["device_groups"]) from None


def _count(ranks: object) -> int:
    """The number of processes that ms-swift's `ranks` stand for: a number, a list, or the text of a Python list."""
    if isinstance(ranks, list):
        return len(ranks)
    text = str(ranks)
    if found := re.fullmatch(r"list\(range\((?:(\d+), *)?(\d+)\)\)", text.strip()):
        return int(found[2]) - int(found[1] or 0)
    return int(text)
