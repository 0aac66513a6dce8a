"""Generated answers from a run's file, sampled across it, since it may be large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardproof.report.terminal import said

PLACES, OF_ONE_STEP = 12, 3
LONGEST = 4000  # characters of one text


def spread_samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Up to `OF_ONE_STEP` answers of up to `PLACES` steps, in the order of the steps, each with `step`, `prompt`,
    `completion` (texts), `rewards`, `advantage` and `right`, the reference answer (or None)."""
    found: dict[int, list[dict[str, Any]]] = {}
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for place in range(PLACES):
                file.seek(size * place // PLACES)
                if place:
                    file.readline()  # skip the rest of a line
                read = _of_a_step(file)
                if read and read[0]["step"] not in found:
                    found[read[0]["step"]] = read
            if size > PLACES:
                file.seek(max(0, size - 65536))
                last = [sample for line in file.read().splitlines() if (sample := _sample(line))]
                if last:
                    step = last[-1]["step"]
                    found.setdefault(step, [s for s in last if s["step"] == step][:OF_ONE_STEP])
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    return [sample for step in sorted(found) for sample in found[step]]


def _of_a_step(file: Any) -> list[dict[str, Any]]:
    """The next answers, all from one step."""
    read: list[dict[str, Any]] = []
    for _ in range(4 * OF_ONE_STEP):
        line = file.readline()
        sample = _sample(line)
        if not line or (sample and read and sample["step"] != read[0]["step"]) or len(read) == OF_ONE_STEP:
            break
        if sample:
            read.append(sample)
    return read


def _sample(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        rewards = record["rewards"].items()
        return {
            "step": int(record["step"]),
            "prompt": _text(record["prompt"]),
            "completion": _text(record["completion"]),
            "rewards": {str(name): value for name, value in rewards if isinstance(value, (int, float))},
            "advantage": record.get("advantage"),
            "right": _text(record["labels"]) if "labels" in record else None,
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _text(told: Any) -> str:
    if isinstance(told, list):
        told = "\n".join(f"{turn.get('role', '')}: {said(turn.get('content'))}" for turn in told)
    text = str(told)
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
