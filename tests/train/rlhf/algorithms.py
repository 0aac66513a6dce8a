"""Runs of `shardproof rlhf` without its processes: the ranks of the pool are there already."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aside
from shardproof.train.options.rlhf_config import RlhfConfig

Series = list[dict[str, Any]]  # the records of metrics.jsonl


def prepared_for(
    argv: list[str], world: int, variants: list[dict[str, Any]], folder: Path, kind: type[Any] = RlhfConfig
) -> list[Any]:
    """What the command prepares, for each variant of the options."""
    from shardproof.cli import training
    from shardproof.train.run import recipe_of

    prepared = []
    for i, variant in enumerate(variants):
        config, _ = training.parse(kind, "", [*argv, "--output-dir", str(folder / str(i))])
        config = config.model_copy(update={"nproc": world, **variant})
        recipe = recipe_of(config)
        prepared.append(recipe.prepare(config, world, *recipe.read(config)))
    return prepared


def series_of(prepared: list[Any]) -> list[Series]:
    """Train them one after the other on this rank; the records of each, on rank 0."""
    import torch

    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.report.terminal import Silent
    from shardproof.train.rlhf import recipe as rlhf

    before_imports(local=True, verbose=False)
    after_imports(verbose=False)
    found = []
    if any(run.config.quantize for run in prepared):
        aside.bitsandbytes()
    for run in prepared:
        with drawn_by_place():
            rlhf.train(run, Silent())
        found.append(_records(run.folder) if torch.distributed.get_rank() == 0 else [])
    return found


def series_without_room(prepared: list[Any]) -> list[Series]:
    """The same where there is no memory to keep weights gathered while answers are written."""
    with mock.patch("shardproof.zero.schedule.room.free_memory", return_value=0):
        return series_of(prepared)


def batches_without_padding(prepared: list[Any]) -> int:
    """Train on this rank; how many batches a decoder was given end to end, beside the one on which it was tried."""
    from shardproof.models.attention.padding_free import PaddingFree

    seen, found = [], PaddingFree._found

    def note(self: Any, *args: Any) -> Any:
        places = found(self, *args)
        seen.append(places is not None)
        return places

    with mock.patch.object(PaddingFree, "_found", note):
        series_of(prepared)
    return sum(seen) - len(prepared)


def bytes_in_attention(prepared: list[Any]) -> int:
    """Train on this rank; what it sent to those that share its rows, beside what the trial of a few tokens took."""
    from shardproof.parallel.sequence import SequenceParallel
    from shardproof.train import callbacks

    seen: list[int] = []
    told = callbacks.check_shared_rows

    def tried(model: Any, ids: Any) -> None:
        told(model, ids)
        seen.append(-_sent())

    def _sent() -> int:
        return sum(thing.bytes_sent for thing in gc.get_objects() if isinstance(thing, SequenceParallel))

    with mock.patch.object(callbacks, "check_shared_rows", tried):
        series_of(prepared)
    return sum(seen) + _sent() * len(prepared)


def patches_valued(prepared: list[Any]) -> list[tuple[int, int]]:
    """Train on this rank; of each call of ppo's value model how many patches it is given, and how many of their places
    are among its tokens."""
    from shardproof.train.rlhf.ppo import PpoTrainer

    seen: list[tuple[int, int]] = []
    ask = PpoTrainer._values

    def note(self: Any, batch: Any) -> Any:
        def given(_: Any, args: Any, inputs: dict[str, Any]) -> None:
            merged = self.model.config.vision_config.spatial_merge_size**2
            places = int((inputs["input_ids"] == self.model.config.image_token_id).sum()) * merged
            seen.append((len(inputs.get("pixel_values", ())), places))

        with self.value_model.register_forward_pre_hook(given, with_kwargs=True):
            return ask(self, batch)

    with mock.patch.object(PpoTrainer, "_values", note):
        series_of(prepared)
    return seen


def pixels_seen(prepared: list[Any]) -> list[tuple[bool, tuple[int, ...], float]]:
    """Train on this rank; of each call of the model whether it is of rows to train on, which, and the sum of pixels."""
    from shardproof.train.rlhf.prompted import Prompted

    seen, given = [], Prompted.given

    def note(self: Any, numbers: Any, *args: Any) -> Any:
        made = given(self, numbers, *args)
        mine = self._examples.rows is prepared[0].rows.format["format_kwargs"]["transform"].rows
        seen.append((mine, tuple(numbers), float(made["pixel_values"].sum()) if "pixel_values" in made else 0.0))
        return made

    with mock.patch.object(Prompted, "given", note):
        series_of(prepared)
    return seen


def _records(folder: Path) -> Series:
    """The lines of metrics.jsonl, each with the rewards of the answers written in its step, if any were."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written = folder / "completions.jsonl"
    answers = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    for record in records:
        of_step = [a["rewards"].values() for a in answers if a["step"] == record["step"]]
        record["answers"] = sorted(sum(reward or 0.0 for reward in rewards) for rewards in of_step)
    return records


@contextlib.contextmanager
def drawn_by_place() -> Iterator[None]:
    """Inside, what a sampler draws depends on the place of the answer in the batch of all ranks and on that of the
    token in it, and on nothing else: with another number of ranks the same answers are written."""
    import torch

    from shardproof.train.rlhf.generating import Generating

    rank, generate = torch.distributed.get_rank(), Generating._written
    drawn = [0, 0]  # batches, tokens of this one

    def begin(self: Any, inputs: Any) -> Any:
        drawn[:] = [drawn[0] + 1, 0]
        return generate(self, inputs)

    def draw(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        drawn[1] += 1
        places = torch.arange(len(probabilities), dtype=torch.float64, device=probabilities.device) + rank * len(
            probabilities
        )
        even = (places * 0.618034 + drawn[1] * 0.414214 + drawn[0] * 0.732051) % 1.0
        sums = probabilities.double().cumsum(dim=-1)
        return torch.searchsorted(sums, (even * sums[:, -1]).unsqueeze(1)).clamp(max=probabilities.size(-1) - 1)

    with mock.patch.object(Generating, "_written", begin), mock.patch("torch.multinomial", draw):
        yield
