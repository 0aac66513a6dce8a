"""What does it cost to record a run? Steps of `shardproof sft`'s own trainer with and without recording, interleaved.

    python benchmarks/overhead.py                                # tiny (2 M parameters), 2 ranks, stage 3
    python benchmarks/overhead.py --model small --steps 200      # 27 M parameters: the smallest step of a normal run
    python benchmarks/overhead.py --stage 0 --steps 400 --dataset FILE --model FOLDER

Alternately, four steps are recorded in full (ranks meet and exchange their numbers, a record is written, a line is
shown) and four not at all (nothing is logged). Nothing else makes the ranks wait for each other, so work that a rank
does for the record while another still computes costs nothing, as in any run. Adjacent times are compared: the median
of the ratios, with its 95 % bootstrap interval, shows the cost of recording per step, in wall-clock time and in CPU
time of rank 0. Steps vary by more than this cost, so recording is also timed by itself. The step whose timeline is kept
is reported separately; there is one per run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROW = {"query": "what does a rank hold of a model " * 4, "response": "a shard of each unit, and no more " * 8}
RANKS = 2
BLOCK = 4  # consecutive steps of one kind
WARM = 6  # uncounted blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dataset", help="default: rows of one length, so that steps are equal")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and step")
    found = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if found.model == "small":
            found.model = str(small(folder / "model"))
        rows = found.dataset or equal_rows(folder / "rows.jsonl")
        argv = ["--model", found.model, "--dataset", rows, "--max-steps", str(found.steps)]
        argv += ["--stage", str(found.stage), "--nproc", str(RANKS), "--per-device-batch-size", str(found.batch)]
        argv += ["--output-dir", str(folder / "run")]
        run_ranks(argv, folder)
        tell(*(numbers_of(folder / name) for name in ("times", "times.told")))


def numbers_of(file: Path) -> list[list[float]]:
    return [[float(x) for x in line.split()] for line in file.read_text().splitlines()]


def equal_rows(file: Path, count: int = 512) -> str:
    file.write_text((json.dumps(ROW) + "\n") * count)
    return str(file)


def small(folder: Path) -> Path:
    """A Qwen3 of 27 M parameters with the tokenizer of the tiny one."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    from shardproof.models.tiny import build_tiny

    config = AutoConfig.from_pretrained(build_tiny(folder, [ROW["query"], ROW["response"]]))
    config.update({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "layer_types": None})
    Qwen3ForCausalLM(type(config)(**config.to_dict())).save_pretrained(folder)
    return folder


def run_ranks(argv: list[str], folder: Path) -> None:
    from shardproof.cli.processes.launch import launch
    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.cli.training import parse
    from shardproof.train.options.config import SftConfig
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
    from shardproof.train import trainer
    from shardproof.train.sft import recipe as sft

    dist.init_process_group("gloo")
    times: list[str] = []
    told: list[str] = []

    class Turns(TrainerCallback):
        """The last callback apart from the run's own, so it decides what is logged."""

        begun: tuple[float, float] | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.perf_counter(), time.process_time()
            if self.begun is not None:  # from the start of the last step to the start of this one
                took = now[0] - self.begun[0], now[1] - self.begun[1]
                times.append(f"{took[0]} {int(self.recorded)} {int(self.timed)} {took[1]}")
            self.begun, self.timed = now, made[0].recorder.timeline is not None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.recorded = control.should_log = (state.global_step - 1) // BLOCK % 2 == 0

    made: list[Any] = []

    class Kept(trainer.SftTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Turns())
            made.append(self)

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            recorded, started = self.control.should_log, (time.perf_counter(), time.process_time())
            super()._maybe_log_save_evaluate(*args, **kwargs)
            if recorded:
                told.append(f"{time.perf_counter() - started[0]} {time.process_time() - started[1]}")

    trainer.SftTrainer = Kept  # type: ignore[misc]
    with contextlib.redirect_stdout(io.StringIO()):
        sft.train(prepared, Lines(most=10**9))
    if dist.get_rank() == 0:
        Path(file).write_text("\n".join(times))
        Path(file + ".told").write_text("\n".join(told))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def tell(times: list[list[float]], told: list[list[float]]) -> None:
    blocks = [times[at : at + BLOCK] for at in range(0, len(times) - BLOCK + 1, BLOCK)][WARM:]
    pairs = [(a, b) if a[0][1] else (b, a) for a, b in itertools.pairwise(blocks)]
    pairs = [(on, off) for on, off in pairs if not any(step[2] for step in on + off)]
    for name, at in (("wall clock", 0), ("processor time", 3)):
        sums = [(sum(step[at] for step in on), sum(step[at] for step in off)) for on, off in pairs]
        ratios = [on / off for on, off in sums]
        plain = statistics.median(off for _, off in sums) / BLOCK
        drawn = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
        print(
            f"{name}: {1e3 * plain:.1f} ms a step without recording; with it {statistics.median(ratios):.4f} of that "
            f"({drawn[50]:.4f} to {drawn[-51]:.4f}), {len(ratios)} pairs of {BLOCK} steps"
        )
    wall, processor = (statistics.median(took[at] for took in told[WARM:]) for at in (0, 1))
    plain = statistics.median(step[0] for step in times if not step[1])
    print(
        f"telling it: {1e3 * wall:.2f} ms from the end of a step until its record is written, waits for the other rank "
        f"included ({100 * wall / plain:.2f} % of a step); processor time {1e3 * processor:.2f} ms"
    )
    watched = [at[0] for at in times if at[2]]
    print(f"the step whose timeline was kept: {1e3 * watched[0]:.1f} ms" if watched else "no timeline was kept")


if __name__ == "__main__":
    main()
