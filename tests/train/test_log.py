"""What a log says, and what it costs: the ranks meet for it once."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.train.watching.recorder import NAMES, Recorder, tokens_in

STEPS = 5


def _history(folder: str, as_trainer_does: bool) -> tuple[list[dict[str, float]], float, list[int]]:
    """What is logged every second step; the operations of the run; the collectives from a step to its record."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator

    from shardproof.integrations.transformers import ShardedTrainerMixin
    from shardproof.train.options.config import Batch
    from shardproof.train.trainer import SftTrainer

    calls: list[str] = []
    counted: list[int] = []

    class Counted(SftTrainer):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            before, logs = len(calls), self.control.should_log
            if as_trainer_does:
                ShardedTrainerMixin._maybe_log_save_evaluate(self, *args, **kwargs)
            else:
                super()._maybe_log_save_evaluate(*args, **kwargs)
            if logs:
                counted.append(len(calls) - before)

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 67, (8,), generator=draw).tolist() for _ in range(4 * STEPS)]
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=STEPS, learning_rate=1e-2, logging_steps=2,
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, save_strategy="no",
    )  # fmt: skip
    trainer = Counted(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=67, num_key_value_heads=2, **sizes)),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row, "attention_mask": [1] * 8} for row in ids],
        data_collator=default_data_collator,
        batch=Batch(micro=2, accumulation=1, world_size=dist.get_world_size() if dist.is_initialized() else 1),
        order_seed=0,
        stage=3,
    )
    plain = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (calls.append("all_gather"), plain(*args, **kwargs))[1]
    try:
        trainer.train()
    finally:
        dist.all_gather = plain
    return trainer.state.log_history, trainer.state.total_flos, counted


@pytest.mark.parametrize("world", [1, 2])
def test_one_exchange_tells_what_those_of_trainer_tell(run: Any, tmp_path: Path, world: int) -> None:
    told = run(world, _history, str(tmp_path / "ours"), False)
    theirs = run(world, _history, str(tmp_path / "theirs"), True)
    for (history, operations, calls), (expected, expected_operations, more) in zip(told, theirs, strict=True):
        assert [log["step"] for log in history] == [2, 4, 5, 5]  # what is left at the last step, and the end
        for log, other in zip(history, expected, strict=True):
            assert log.keys() == other.keys()
            same = log.keys() - {"memory", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
            assert {name: log[name] for name in same} == {name: other[name] for name in same}
        assert operations == expected_operations > 0
        if world > 1:
            assert calls == [1, 1, 1]
            assert more == [3, 3, 3]


def test_seconds_are_those_of_all_starts_and_an_evaluation_is_no_training() -> None:
    recorder = Recorder()
    begins = SimpleNamespace(global_step=0, max_steps=9)
    recorder.on_train_begin(None, begins, None)
    time.sleep(0.05)
    with recorder.left_out():
        time.sleep(0.2)
    run, since_log = recorder.seconds()
    assert run >= 0.25
    assert 0.05 <= since_log <= run - 0.2
    resumed = Recorder()
    resumed.on_train_begin(None, begins, None)
    resumed.go_on(run, since_log)
    assert resumed.seconds()[0] >= run
    assert resumed.take(tokens=5.0)[NAMES.index("seconds")] >= since_log
    assert resumed.take(tokens=5.0)[NAMES.index("seconds")] < since_log


def test_the_view_of_a_resumed_run_knows_how_much_is_done() -> None:
    """The time left follows from the steps of this start, not from those before it."""
    from shardproof.report.terminal import Silent
    from shardproof.train.watching.report import Reporter

    told = []

    class Told(Silent):
        def begin(self, steps: int, done: int = 0) -> None:
            told.append((steps, done))

    Reporter(lambda record: None, Told()).on_train_begin(None, SimpleNamespace(max_steps=20, global_step=16), None)
    assert told == [(20, 16)]


def test_tokens_are_those_that_the_model_is_given() -> None:
    """Of what is masked besides: pixels, what sees a picture, and questions that both answers begin with already."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    prompts = {"prompt_attention_mask": mask, "chosen_attention_mask": mask, "rejected_attention_mask": mask}
    assert tokens_in({"attention_mask": mask, "pixel_attention_mask": torch.ones(2, 1, 8, 8)}) == 7
    assert tokens_in({"attention_mask": mask, "cross_attention_mask": torch.ones(2, 4, 1, 4)}) == 7
    assert tokens_in({"attention_mask": mask, "prompt_attention_mask": mask[:, :2]}) == 7  # of gkd
    assert tokens_in(prompts) == 14  # of orpo and cpo
    assert tokens_in({"attention_mask": mask, "completion_mask": mask, "KL_attention_mask": mask}) == 14
    assert tokens_in({"prompt_mask": mask, "completion_mask": mask, "pixel_attention_mask": torch.ones(2, 8, 8)}) == 14


def test_who_watches_hears_how_far_an_evaluation_is() -> None:
    """Whether the loop over its batches is ours or Trainer's."""
    from shardproof.train.stop import StopMixin
    from shardproof.train.watching.report import Reporter

    heard: list[tuple[int, int]] = []
    view: Any = SimpleNamespace(evaluated=lambda *told: heard.append(told))
    reporter = Reporter(lambda record: None, view)
    trainer = StopMixin()
    trainer.callback_handler = SimpleNamespace(callbacks=[reporter])
    assert list(trainer.each_evaluated("abc")) == ["a", "b", "c"]
    assert heard == [(1, 3), (2, 3), (3, 3)]
    for _ in range(2):
        for batch in (loader := ["a", "b"]):
            reporter.on_prediction_step(None, None, batch, eval_dataloader=loader)
        reporter.on_evaluate(None, None, None)
    assert heard[3:] == [(1, 2), (2, 2)] * 2
