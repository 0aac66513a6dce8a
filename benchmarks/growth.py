"""How does a step grow with the number of ranks, the number of layers, and the size of a unit?

    python benchmarks/growth.py                      # all three
    python benchmarks/growth.py --of units --rounds 8

Each line is a run of `step_time.py` with the engines named at the top. Next to the time is its ratio to `alone`, a
rank's share of the work without any communication, which shows what an engine adds. On a machine with fewer cores than
ranks, the ranks take turns, and only ratios are meaningful.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
LINES: dict[str, list[tuple[str, list[str]]]] = {
    "ranks": [(str(n), ["--world", str(n)]) for n in (1, 2, 4)],
    "depth": [(f"{n} layers", ["--model", f"384x{n}"]) for n in (4, 8, 16, 32)],
    "units": [(f"{n} layers a unit", ["--model", "384x16", "--together", str(n)]) for n in (1, 2, 4, 8)],
}


def measured(engines: list[str], rounds: int, options: list[str], model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/told.json"
        model_options = [] if "--model" in options else ["--model", model]
        command = [sys.executable, str(HERE / "step_time.py"), *model_options, *options, "--rounds", str(rounds)]
        subprocess.run(
            [*command, "--engines", "alone", *engines, "--json", file], check=True, stdout=subprocess.DEVNULL
        )
        return json.loads(Path(file).read_text())["engines"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", nargs="+", choices=list(LINES), default=list(LINES))
    parser.add_argument("--engines", nargs="+", default=["fsdp2", "ours-0", "ours-3"])
    parser.add_argument("--model", default="36m", help="for lines that do not name one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--most", type=int, default=99, help="maximum number of lines per table")
    options = parser.parse_args()
    for table in options.of:
        heads = [table, "alone, ms", *(f"{name}, ms" for name in options.engines)]
        heads += [f"{name} / alone" for name in options.engines]
        print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for name, more in LINES[table][: options.most]:
            found = measured(options.engines, options.rounds, more, options.model)
            times = [f"{1e3 * found[engine]['median_s']:.0f}" for engine in ("alone", *options.engines)]
            ratios = [_ratio(found, engine) for engine in options.engines]
            print(f"| {' | '.join([name, *times, *ratios])} |", flush=True)


def _ratio(found: dict[str, Any], engine: str) -> str:
    pairs = zip(found[engine]["wall_s"], found["alone"]["wall_s"], strict=True)
    return f"{median(a / b for a, b in pairs):.2f}"


if __name__ == "__main__":
    main()
