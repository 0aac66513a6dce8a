"""The best checkpoint of a Trainer with `ResumeMixin` is kept, and loaded in the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof
from distributed.harness import listening
from zero.language_models import tiny


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 50, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in ids]


def resumable(folder: Path, **options: Any) -> Any:
    """A Trainer whose every step makes the model worse, and saves it."""
    from transformers import Trainer, TrainingArguments

    from shardproof.integrations.resume import ResumeMixin
    from shardproof.integrations.transformers import ShardedTrainerMixin

    class Resumable(ResumeMixin, ShardedTrainerMixin, Trainer):
        """As its documentation says."""

    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_steps": 1, "learning_rate": 3.0, **options},
    )
    return Resumable(model=tiny("Llama"), args=args, train_dataset=rows(20), eval_dataset=rows(4), stage=3)


def test_a_limit_of_nought_keeps_all(tmp_path: Path) -> None:
    """As it does in Trainer."""
    resumable(tmp_path, max_steps=3, save_total_limit=0).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 3)]


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    """Where each step makes it worse, the first is the best: at the limit, it and the newest are there."""
    from shardproof.checkpoint.api import load_weights

    best_at_end = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = resumable(tmp_path, max_steps=5, save_total_limit=2, eval_strategy="steps", eval_steps=1, **best_at_end)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    best = 1 + losses.index(min(losses))
    assert best < 5
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{best}", "checkpoint-5"]
    expected = tiny("Llama")
    load_weights(expected, tmp_path / f"checkpoint-{best}")
    for name, value in expected.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{best}")


def test_a_best_evaluation_without_a_checkpoint(tmp_path: Path) -> None:
    """Where the first step is the best, and only every second is saved, it is the best of those."""
    from shardproof.checkpoint.api import load_weights

    best_at_end = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = resumable(tmp_path, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=1, **best_at_end)
    with listening() as lines:
        trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses.index(min(losses)) == 0
    best = 2 if losses[1] <= losses[3] else 4
    assert any(f"step {best}, the best evaluation; that of step 1 was better" in line for line in lines)
    expected = tiny("Llama")
    load_weights(expected, tmp_path / f"checkpoint-{best}")
    for name, value in expected.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_a_checkpoint_that_could_not_be_written_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of those that are there is kept, and taken in the end."""
    save = shardproof.save

    def full(model: Any, optimizer: Any, path: str, **options: Any) -> Any:
        if path.endswith("checkpoint-1"):
            raise shardproof.CheckpointError("the disk is full")
        return save(model, optimizer, path, **options)

    monkeypatch.setattr(shardproof, "save", full)
    best_at_end = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    trainer = resumable(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, **best_at_end)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    best = 2 + losses[1:].index(min(losses[1:]))
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert (tmp_path / f"checkpoint-{best}").is_dir()


@pytest.mark.slow
def test_a_checkpoint_that_is_still_being_written_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes longer than a step must not lose it."""
    from shardproof.checkpoint.saving import Saving

    run = Saving._run

    def slowly(self: Saving) -> None:
        time.sleep(1.0)
        run(self)

    monkeypatch.setattr(Saving, "_run", slowly)
    best_at_end = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    trainer = resumable(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, **best_at_end)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses[0] < min(losses[1:])
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_mean_loss_of_a_run_that_goes_on_is_of_its_own_steps(tmp_path: Path) -> None:
    """As in Trainer: the losses of all steps were divided by the steps of this call."""
    options = {"max_steps": 5, "logging_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    whole = resumable(tmp_path / "a", **options).train().training_loss
    first = resumable(tmp_path / "b", **{**options, "max_steps": 2}).train().training_loss
    again = resumable(tmp_path / "b", **options)
    found = again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2")).training_loss
    assert 2 * first + 3 * found == pytest.approx(5 * whole, rel=1e-3)
    assert found == pytest.approx(whole, rel=0.05)


def test_a_run_that_is_at_its_end_trains_nothing(tmp_path: Path) -> None:
    """Trainer looks at the number of steps after a step."""
    resumable(tmp_path, max_steps=3).train()
    again = resumable(tmp_path, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 3
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 3)]


@pytest.mark.sampled
@pytest.mark.parametrize("change", [{"max_steps": 2}, {"lr_scheduler_type": "constant"}])
def test_from_its_first_step_on_a_run_has_the_rates_of_its_own_schedule(tmp_path: Path, change: dict[str, Any]) -> None:
    """Not those of the run that wrote the checkpoint, which may have been at its end, at 0."""
    options = {"max_steps": 4, "logging_steps": 1}
    whole = resumable(tmp_path / "whole", **options)
    whole.train()
    resumable(tmp_path / "begun", **{**options, **change}).train()
    again = resumable(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    logs = [trainer.state.log_history for trainer in (whole, again)]
    rates = [[log["learning_rate"] for log in each if "learning_rate" in log and log["step"] > 2] for each in logs]
    assert rates[0] == rates[1] == [1.5, 0.75]


def test_one_process_that_sees_several_accelerators(tmp_path: Path) -> None:
    """Trainer would give it a batch for each, and put the model into DataParallel."""
    from transformers import Trainer, TrainingArguments

    from shardproof.integrations.transformers import sharded

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, report_to="none")
    args._n_gpu = 4
    trainer = sharded(Trainer)(model=tiny("Llama"), args=args, train_dataset=rows(4), stage=3)
    assert trainer.args.n_gpu == 1
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (2, 8)
