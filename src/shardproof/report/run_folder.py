"""Read the folder of a run, whether it is running, was killed, or is damaged.

Nothing here raises because of the contents of a file: unreadable files are reported in `notes`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardproof.report.samples import spread_samples

CONFIG, METRICS, COMPLETIONS, ERRORS, MODEL = "config.yaml", "metrics.jsonl", "completions.jsonl", "error.txt", "model"
TIMELINES, REPORT, LOCK = "timeline.rank*.json", "report.html", ".lock"

POINTS = 1200  # per line of the page
RANK_POINTS = 4000  # for the lines of all ranks together
RANK_RECORDS = 10_000  # above this number, only every second, third ... record is read for the ranks' lines

SAME_MOMENT = 5.0  # seconds within which a run writes its last step and its error, or a folder is copied

# Not drawn over the steps.
_NOT_A_SERIES = {"step", "steps", "seconds", "tokens", "memory", "epoch"}

Line = tuple[list[float], list[float]]  # steps and values


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, ERRORS))


def load_run(folder: Path, name: str) -> dict[str, Any]:
    """The page's data about a run, as plain JSON."""
    notes: list[str] = []
    records = _in_order(_json_lines(folder / METRICS, notes))
    logged = [record for record in records if "loss" in record]
    lines, unfinite = _lines(records)
    rank_names, rank_lines = _rank_lines(logged)
    lines.update(_derived(logged))
    state, told = _state(folder, logged)
    return {
        "name": name,
        "path": str(folder),
        "state": state,
        "told": told,
        "config": _config(folder / CONFIG, notes),
        "steps": logged[-1]["steps"] if logged else 0,
        "last": int(records[-1]["step"]) if records else 0,
        "summary": _summary(logged, lines),
        "lines": {key: _rounded(thin(line)) for key, line in lines.items()},
        "unfinite": {key: steps[:200] for key, steps in unfinite.items()},
        "rank_names": rank_names,
        "rank_lines": rank_lines,
        "samples": spread_samples(folder / COMPLETIONS, notes),
        "timelines": _timelines(folder, notes),
        "notes": notes,
    }


def version_of(folders: Iterable[Path]) -> str:
    """A string that changes when a file of these runs does, or when a run starts or ends."""
    parts = []
    for folder in folders:
        names = [CONFIG, METRICS, COMPLETIONS, ERRORS, MODEL]
        for path in [*(folder / name for name in names), *sorted(folder.glob(TIMELINES))]:
            with contextlib.suppress(OSError):
                stat = path.stat()
                parts.append(f"{path.name}:{stat.st_mtime_ns}:{stat.st_size}")
        parts.append("at work" if _at_work(folder) else "at rest")
    return " ".join(parts)


# --- files -------------------------------------------------------------------------------------------


def _json_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file that have a step; other lines are counted in `notes`."""
    lost = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    record["step"], record["steps"] = int(record["step"]), int(record.get("steps") or 0)
                    yield record
                except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
                    lost += 1
    except FileNotFoundError:
        notes.append(f"{path.name} does not exist.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    if lost:
        notes.append(f"{lost} line(s) of {path.name} are not records; the last line of a killed run may be incomplete.")


def _in_order(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records by step; if a run repeated a step, its last record counts."""
    newest = {(r["step"], "loss" in r, "eval_loss" in r): r for r in records}
    return sorted(newest.values(), key=lambda r: r["step"])


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.append(f"{path.name} does not exist.")
        return {}
    except (OSError, yaml.YAMLError):
        notes.append(f"{path.name} cannot be read.")
        return {}
    return {str(key): _plain(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value if value is None or isinstance(value, (bool, int, str)) or _finite(value) else str(value)


def _timelines(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob(TIMELINES)):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: told[key] for key in ("step", "rank", "seconds", "computed", "moved", "met", "cut")}
            _check_timeline(kept)
            found.append(kept)
        except (OSError, ValueError, KeyError, TypeError):
            notes.append(f"{path.name} cannot be read.")
    return sorted(found, key=lambda timeline: timeline["rank"])


def _check_timeline(told: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for anything that is not a timeline."""
    widths = (("computed", 2, 2), ("moved", 3, 3), ("met", 1, 2))
    for key, words, times in widths:
        for row in told[key]:
            if len(row) != words + times or not all(_finite(value) for value in row[words:]):
                raise ValueError(key)
    if not (_finite(told["seconds"]) and isinstance(told["rank"], int)):
        raise ValueError("seconds")


def _state(folder: Path, logged: list[dict[str, Any]]) -> tuple[str, str]:
    """The state of the run, as a word and as a sentence, from its files. If a run continues in the folder, earlier
    weights and errors are ignored."""
    steps, last = (logged[-1]["steps"], logged[-1]["step"]) if logged else (0, 0)
    changed = _changed(folder / METRICS)
    # A point in time, since an age would be wrong in a page that is opened later, or that watches a run that hangs.
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
    since = f"last step at {when}" if logged else "no step recorded yet"
    if _at_work(folder):
        return "open", f"running; {since}"
    if (folder / MODEL).exists():
        if steps and last < steps:
            return "stopped", f"stopped after step {last:,} of {steps:,}; its weights are saved"
        return "finished", "finished; its weights are saved"
    with contextlib.suppress(OSError):
        lines = (folder / ERRORS).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines and _changed(folder / ERRORS) >= changed - SAME_MOMENT:
            return "failed", f"failed: {lines[-1][:300]}"
    if not logged:
        return "empty", "no step recorded"
    return "open", f"no end recorded: it was killed, or is running on another machine; {since}"


def _changed(path: Path) -> float:
    """The modification time in seconds since 1970; 0 if the file does not exist."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _at_work(folder: Path) -> bool:
    """Whether a process on this machine is working in the folder of a run, according to its lock file. The lock itself
    is not tried, since that could keep out a run that is just starting."""
    with contextlib.suppress(OSError, ValueError):
        word, number, _, host = (folder / LOCK).read_text(encoding="utf-8").split()
        if word == "process" and host == socket.gethostname():
            with contextlib.suppress(PermissionError):  # another user's process
                os.kill(int(number), 0)  # only checks that it exists
            return True
    return False


# --- numbers -----------------------------------------------------------------------------------------


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _lines(records: list[dict[str, Any]]) -> tuple[dict[str, Line], dict[str, list[int]]]:
    """The recorded values over the steps, by name, and the steps at which they were inf or nan."""
    lines: dict[str, Line] = {}
    unfinite: dict[str, list[int]] = {}
    for record in records:
        for key, value in record.items():
            if key in _NOT_A_SERIES or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value):
                steps, values = lines.setdefault(key, ([], []))
                steps.append(record["step"])
                values.append(value)
            else:
                unfinite.setdefault(key, []).append(record["step"])
    return lines, unfinite


def _rank_lines(logged: list[dict[str, Any]]) -> tuple[list[str], dict[str, list[Line]]]:
    """The values of each rank per step; for many ranks the minimum, median and maximum."""
    told = [r for r in logged if isinstance(r.get("ranks"), dict) and isinstance(r["ranks"].get("memory"), list)]
    if not told:
        return [], {}
    of = told[-1]["ranks"].get("of") if len(told[-1]["ranks"]["memory"]) == 3 else None
    count = max(len(told[-1]["ranks"]["memory"]), 1)
    names = (
        [f"{which} of {of[0]} ranks" for which in ("minimum", "median", "maximum")]
        if isinstance(of, list) and of
        else []
    )
    # If a run resumed from another's checkpoint, its first record covers as many steps as the second.
    first = max(0, 2 * told[0]["step"] - told[1]["step"]) if told[1:] else 0
    before = [first, *(record["step"] for record in told)]
    lines: dict[str, list[Line]] = {}
    for at in range(0, len(told), len(told) // RANK_RECORDS + 1):
        record = told[at]
        between = record["step"] - before[at]
        values = _of_ranks(record["ranks"], max(between, 1))
        for key, by_rank in values.items():
            if len(by_rank) == count and all(_finite(value) for value in by_rank):
                of_key = lines.setdefault(key, [([], []) for _ in range(count)])
                for (steps, series), value in zip(of_key, by_rank, strict=True):
                    steps.append(record["step"])
                    series.append(value)
    most = max(200, RANK_POINTS // count)
    names = names or [f"rank {rank}" for rank in range(count)]
    return names, {key: [_rounded(thin(line, most)) for line in by_rank] for key, by_rank in lines.items()}


def _of_ranks(ranks: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """The plotted values of the ranks in one record, per step that it covers."""
    found: dict[str, list[float]] = {}
    with contextlib.suppress(TypeError, KeyError, ValueError, ZeroDivisionError):
        found |= {key: ranks[key] for key in ("tokens_per_second", "memory", "held")}
        found |= {key: [value / steps for value in ranks[key]] for key in ("gathered", "reduced")}
        sent = [key for key in ("away", "attention") if max(ranks.get(key, [0])) > 0]
        found |= {key: [value / steps for value in ranks[key]] for key in sent}
        parts = zip(ranks["waited"], ranks["met"], ranks["seconds"], strict=True)
        found["waiting"] = [100 * (waited + met) / seconds for waited, met, seconds in parts]
    return found


def _derived(logged: list[dict[str, Any]]) -> dict[str, Line]:
    """Seconds per step, between records, without evaluations."""
    steps: list[float] = []
    values: list[float] = []
    for before, record in itertools.pairwise(logged):
        tokens, rate, between = record.get("tokens"), record.get("tokens_per_second"), record["step"] - before["step"]
        if isinstance(tokens, int) and isinstance(rate, float) and math.isfinite(rate) and rate > 0 and between > 0:
            steps.append(record["step"])
            values.append(tokens / rate / between)
    return {"step_seconds": (steps, values)} if steps else {}


def _summary(logged: list[dict[str, Any]], lines: dict[str, Line]) -> dict[str, float | None]:
    """The numbers at the top of the page; those not recorded are left out, and non-finite ones are None."""

    def values(key: str) -> list[float]:
        return sorted(lines.get(key, ([], []))[1])

    found: dict[str, float | None] = {}
    for key in ("loss", "reward"):
        if numbers := [r[key] for r in logged if isinstance(r.get(key), (int, float))]:
            found[key] = numbers[-1] if math.isfinite(numbers[-1]) else None
    if "eval_loss" in lines:
        found["eval_loss"] = min(lines["eval_loss"][1])
    if rates := values("tokens_per_second"):
        found["tokens_per_second"] = rates[len(rates) // 2]
    found["tokens"] = sum(r["tokens"] for r in logged if _finite(r.get("tokens")))
    if peaks := [r["memory"] for r in logged if _finite(r.get("memory"))]:
        found["memory"] = max(peaks)
    if took := [r["seconds"] for r in logged if _finite(r.get("seconds"))]:
        found["seconds"] = max(took)
    return found


def thin(line: Line, most: int = POINTS) -> Line:
    """At most `most` points of a line, including the minimum and maximum of each section."""
    steps, values = line
    if len(steps) <= most:
        return line
    kept: list[int] = [0]
    stretches = (most - 2) // 2
    for number in range(stretches):
        begin, end = (1 + (len(steps) - 2) * n // stretches for n in (number, number + 1))
        if begin < end:
            stretch = range(begin, end)
            kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]


def _rounded(line: Line) -> Line:
    return line[0], [float(f"{value:.6g}") for value in line[1]]
