"""The chart in README.md: the casebook, and the time and memory of a step, for each engine.

    python benchmarks/step_time.py --check 11 --tolerance 1e-4 --rounds 12 --json step_time.json
    python benchmarks/peaks.py --json peaks.json
    python benchmarks/picture.py step_time.json peaks.json docs/pictures/peers.svg

The first two take minutes and need a quiet machine; the casebook's results come from `make cases`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STATUSES = {"equal": "#16a34a", "wrong": "#dc2626", "error": "#f59e0b", "hang": "#475569"}
TIME, MEMORY, OURS = "#60a5fa", "#c4b5fd", "#4f46e5"
NAMES = {
    "ddp-views": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed-1": "DeepSpeed ZeRO-1",
    "deepspeed-2": "DeepSpeed ZeRO-2",
    "deepspeed-3": "DeepSpeed ZeRO-3",
    **{f"ours-{stage}": f"shardproof, stage {stage}" for stage in range(4)},
}


def cases(book: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By engine: the number of cases with each outcome, as people write them, without a peer's documented settings."""
    found: dict[str, dict[str, int]] = {}
    for case in book["cases"]:
        for engine in {result["engine"] for result in case["results"]}:
            first = next(result for result in case["results"] if result["engine"] == engine)
            counts = found.setdefault(engine, dict.fromkeys(STATUSES, 0))
            if first["status"] in counts:
                counts[first["status"]] += 1
    return found


def draw(book: dict[str, Any], steps: dict[str, Any], peaks: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif"}
    matplotlib.rcParams |= {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = [name for name in NAMES if name in steps["engines"] and name in peaks]

    counts = cases(book)
    labels = [NAMES[name] for name in names]
    begin = [0] * len(names)
    for status, colour in STATUSES.items():
        lengths = [counts[name.removesuffix("-views")][status] for name in names]
        bars = left.barh(
            labels, lengths, left=begin, color=colour, label=status if status != "wrong" else "wrong, silently"
        )
        left.bar_label(bars, [str(n) if n else "" for n in lengths], label_type="center", color="white")
        begin = [a + b for a, b in zip(begin, lengths, strict=True)]
    left.set_title(f"{len(book['cases'])} public failure cases: equal to one process?")
    left.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    left.set_xticks([])

    height = 0.38
    times = [steps["engines"][name]["ratio_to"]["fsdp2"] for name in names]
    memory = [peaks[name]["resident"] / peaks["fsdp2"]["resident"] for name in names]
    for offset, values, colour, label in (
        (-1, times, TIME, "time of a step"),
        (1, memory, MEMORY, "peak resident memory"),
    ):
        places = [at + offset * height / 2 for at in range(len(names))]
        bars = right.barh(places, values, height=height, color=colour, label=label)
        right.bar_label(bars, [f"{value:.2f}" for value in values], padding=2)
    right.set_yticks(range(len(names)), labels)
    right.set_title("a training step, relative to FSDP2")
    right.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    right.set_xticks([])
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(length=0)
        for label in axes.get_yticklabels():
            if label.get_text().startswith("shardproof"):
                label.set(color=OURS, fontweight="bold")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, facecolor="white", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", type=Path, help="output of step_time.py --json")
    parser.add_argument("peaks", type=Path, help="output of peaks.py --json")
    parser.add_argument("picture", type=Path, help="where to draw")
    parser.add_argument("--casebook", type=Path, default=Path("casebook.json"))
    options = parser.parse_args()
    draw(*(json.loads(file.read_text()) for file in (options.casebook, options.steps, options.peaks)), options.picture)


if __name__ == "__main__":
    main()
