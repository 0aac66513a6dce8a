"""`shardproof infer RUN_DIR --dataset FILE`: answer rows, and show progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.cli.infer_asked import InferConfig


def answer(
    chat: Any,
    config: InferConfig,
    system: str | None,
    sampling: Any,
    worth: Mapping[str, Callable[[str, str], float]],
    row_format: tuple[str, Any] | None,
) -> int:
    """Answer the rows of --dataset, and report what the answers are `worth`, by metric. `row_format`: its name and
    function."""
    from shardproof.train.answers.rows import answer_rows, means_in

    file = Path(str(config.result_path)).expanduser()
    rounds = answer_rows(
        *(chat, config.dataset, config.columns, system, file, sampling),
        *(config.batch_size, config.seed, config.bad_rows, worth, row_format),
    )
    follow(rounds, chat.first, file)
    if worth and chat.first:
        means, judged = means_in(file)
        told = "  ".join(f"{name} {means[name]:.4g}" for name in worth) if judged else "unknown"
        print(f"worth: {told} ({judged:,} rows with an answer of their own)", flush=True)
    return 0


def follow(rounds: Iterator[tuple[int, int, Sequence[Any]]], first: bool, file: Path) -> None:
    """Answer all rows; the `first` rank reports progress and the result."""
    from shardproof.data.rows import SHOWN
    from shardproof.report.terminal import Share

    done = 0
    bad: Sequence[Any] = ()
    with Share("answered", shown=first) as told:
        for done, total, left_out in rounds:
            bad = left_out
            told(done, total)
    if first:
        print(f"answers: {file} ({done:,} rows)", flush=True)
        if bad:
            some = "; ".join(map(str, bad[:SHOWN])) + ("; ..." if len(bad) > SHOWN else "")
            print(f"skipped: {len(bad):,} bad row(s): {some}", flush=True)
