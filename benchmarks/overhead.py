"""What does it cost to record a run? Steps of `shardproof sft`'s own trainer, with and without, interleaved.

    python benchmarks/overhead.py                                # tiny (2 M parameters), 2 ranks, stage 3
    python benchmarks/overhead.py --stage 0 --steps 400 --dataset FILE --model FOLDER

In turn, a step is recorded in full (the engine is watched, ranks meet and exchange their numbers, a record is
written, a line is shown) or not at all (nobody watches, nothing is logged). The times of a pair of neighbours are
compared: the median of the ratios tells what recording costs in a step, on the clock and in the processor time of
rank 0 (which a busy machine disturbs less). The step whose timeline is kept stands for itself; there is one in a run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dataset", help="default: rows of one length, so that steps are equal")
    parser.add_argument("--batch", type=int, default=8, help="rows of a rank in a step")
    found = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = found.dataset or equal_rows(folder / "rows.jsonl")
        argv = ["--model", found.model, "--dataset", rows, "--max-steps", str(found.steps)]
        argv += ["--stage", str(found.stage), "--nproc", str(RANKS), "--per-device-batch-size", str(found.batch)]
        argv += ["--output-dir", str(folder / "run")]
        run_ranks(argv, folder)
        tell([[float(x) for x in line.split()] for line in (folder / "times").read_text().splitlines()])


def equal_rows(file: Path, count: int = 512) -> str:
    row = {"query": "what does a rank hold of a model " * 4, "response": "a shard of each unit, and no more " * 8}
    file.write_text((json.dumps(row) + "\n") * count)
    return str(file)


def run_ranks(argv: list[str], folder: Path) -> None:
    from shardproof.cli.launch import launch
    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.cli.training import parse
    from shardproof.train.config import SftConfig
    from shardproof.train.run import recipe_of

    before_imports(local=True, verbose=False)
    config, _ = parse(SftConfig, "", argv)
    recipe = recipe_of(config)
    prepared = recipe.prepare(config, RANKS, *recipe.read(config))
    prepared.saves = False
    after_imports(verbose=False)
    if launch(worker, (prepared, str(folder / "times")), RANKS):
        sys.exit("a rank has failed")
    prepared.lock.release()


def worker(prepared: Any, file: str, *_: Any) -> int:
    import torch.distributed as dist
    from transformers import TrainerCallback

    from shardproof.report.terminal import Lines
    from shardproof.train import sft, trainer

    dist.init_process_group("gloo")
    times: list[str] = []

    class Turns(TrainerCallback):
        """Every other step is not recorded. The last callback but those of a run, so it has the last word."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder = made[0].recorder
            self.recorded = state.global_step % 2 == 0
            self.timed = recorder.timeline is not None
            dist.barrier()
            self.started, self.processor = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = self.recorded
            if not self.recorded:  # otherwise when the record is written
                self.note()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.note()

        def note(self) -> None:
            took = time.perf_counter() - self.started, time.process_time() - self.processor
            times.append(f"{took[0]} {int(self.recorded)} {int(self.timed)} {took[1]}")

    made: list[Any] = []

    class Kept(trainer.SftTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Turns())
            made.append(self)

    trainer.SftTrainer = Kept  # type: ignore[misc]
    with contextlib.redirect_stdout(io.StringIO()):
        sft.train(prepared, Lines(most=10**9))
    if dist.get_rank() == 0:
        Path(file).write_text("\n".join(times))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def tell(times: list[list[float]]) -> None:
    warm = times[20:]
    pairs = [(a, b) if a[1] else (b, a) for a, b in zip(warm[::2], warm[1::2], strict=False)]
    pairs = [(on, off) for on, off in pairs if not on[2] and not off[2]]
    for name, at in (("wall clock", 0), ("processor time", 3)):
        plain = statistics.median(off[at] for _, off in pairs)
        more = statistics.median(on[at] - off[at] for on, off in pairs)
        low, middle, high = statistics.quantiles([on[at] / off[at] for on, off in pairs], n=4)
        print(
            f"{name}: {1e3 * plain:.1f} ms a step without recording, {1e3 * more:+.2f} ms with; "
            f"ratio {middle:.4f} (quartiles {low:.3f} to {high:.3f}), medians of {len(pairs)} pairs"
        )
    watched = [at[0] for at in times if at[2]]
    print(f"the step whose timeline was kept: {1e3 * watched[0]:.1f} ms" if watched else "no timeline was kept")


if __name__ == "__main__":
    main()
