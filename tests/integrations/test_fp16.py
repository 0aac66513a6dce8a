"""fp16 under Trainer: what overflows on one rank is left out on all, and every stage gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from integrations.test_trainer import STEPS, losses, trainer
from shardproof.errors import NonFiniteError

OVERFLOWS = 1  # the step, counted from 0, whose gradients do not fit on the last rank


def begin(
    folder: str, stage: int, seed: int = 0, bad: tuple[int, ...] = (OVERFLOWS,), by: float = 1e6, **options: Any
) -> Any:
    """A run whose gradients are `by` times as large on the last rank in steps that are `bad`."""
    from transformers import TrainerCallback

    scales: list[float] = []
    run: Any

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            scales.append(run.accelerator.scaler.get_scale())

    run = trainer(Path(folder), stage, seed, fp16=True, callbacks=[Look()], **options)
    run.scales, plain = scales, run.compute_loss
    last = dist.get_rank() == dist.get_world_size() - 1

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        return loss + (loss - loss.detach()) * by if last and run.state.global_step in bad else loss

    run.compute_loss = compute_loss
    return run


def trained(folder: str, stage: int, clip: float) -> dict[str, Any]:
    import shardproof

    run = begin(folder, stage, save_strategy="no", max_grad_norm=clip, lr_scheduler_type="linear")
    run.train()
    return {
        "losses": losses(run),
        "scales": run.scales,
        "rates": [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry],
        "weights": shardproof.full_state_dict(run.model, rank0_only=False),
        "computed in": str(run.shard_precision.compute),
    }


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_is_left_out_on_all_ranks_at_every_stage(run2, tmp_path: Path, clip: float) -> None:
    found = [rank for stage in (0, 1, 3) for rank in run2(trained, str(tmp_path), stage, clip, timeout=180)]
    first = found[0]
    assert first["computed in"] == "torch.float16"
    assert first["scales"] == [2.0**16, *[2.0**15] * (STEPS - 1)]
    assert first["rates"][OVERFLOWS + 1] == first["rates"][OVERFLOWS], "nor did the schedule move"
    for other in found[1:]:
        assert (other["scales"], other["rates"]) == (first["scales"], first["rates"])
        assert other["losses"] == pytest.approx(first["losses"], abs=2e-3)
        for name, weight in other["weights"].items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, first["weights"][name], atol=5e-3, rtol=0)


def interrupted(folder: str) -> tuple[Any, Any]:
    whole = begin(folder, 3)
    whole.train()
    again = begin(folder, 3, seed=9)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return (losses(whole), whole.scales[2:]), (losses(again), again.scales)


def test_a_run_goes_on_with_its_scale(run2, tmp_path: Path) -> None:
    for whole, again in run2(interrupted, str(tmp_path), timeout=180):
        assert again == whole
        assert again[1] == [2.0**15] * 2


def never_finite(folder: str) -> None:
    with pytest.raises(NonFiniteError, match="however small the loss scale"):
        begin(folder, 3, bad=tuple(range(60)), by=1e12, save_strategy="no", max_steps=60).train()


def test_a_loss_that_never_fits_ends_the_run(run2, tmp_path: Path) -> None:
    """It takes seventeen halvings to know."""
    run2(never_finite, str(tmp_path), timeout=180)
