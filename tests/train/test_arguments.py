"""Promise: what AdamW and the schedule are told is what the options say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.run import Prepared
from shardproof.train.settings import arguments


def told(tmp_path: Path, **given: Any) -> dict[str, Any]:
    config = SftConfig(max_steps=10, **given)
    return arguments(Prepared(config, config.batch(1), tmp_path, "model", "tokenizer", [1, 2], None, []))


def test_what_adamw_and_its_schedule_are_told(tmp_path: Path) -> None:
    kwargs = {"min_lr": 1e-6}
    found = told(
        tmp_path, adam_beta2=0.95, adam_epsilon=1e-6, lr_scheduler="cosine_with_min_lr", lr_scheduler_kwargs=kwargs
    )
    assert (found["adam_beta1"], found["adam_beta2"], found["adam_epsilon"]) == (0.9, 0.95, 1e-6)
    assert (found["lr_scheduler_type"], found["lr_scheduler_kwargs"]) == ("cosine_with_min_lr", kwargs)


@pytest.mark.parametrize(("given", "steps"), [({}, 0.05), ({"warmup_steps": 3}, 3), ({"warmup_steps": 0}, 0)])
def test_how_long_the_warm_up_is(tmp_path: Path, given: dict[str, Any], steps: float) -> None:
    assert told(tmp_path, **given)["warmup_steps"] == steps  # below 1, transformers takes it for a share


@pytest.mark.parametrize(
    ("given", "ranks", "micro"),
    [
        ({"rlhf_type": "grpo"}, 1, 8),
        ({"rlhf_type": "grpo"}, 2, 4),
        ({"rlhf_type": "grpo", "gradient_accumulation_steps": 4}, 2, 2),
        ({"rlhf_type": "grpo", "num_generations": 3}, 2, 3),
        ({"rlhf_type": "rloo"}, 1, 2),
        ({"rlhf_type": "dpo"}, 4, 2),
        ({"rlhf_type": "grpo", "per_device_batch_size": 5}, 1, 5),
    ],
)
def test_a_batch_of_answers_goes_with_their_number(given: dict[str, Any], ranks: int, micro: int) -> None:
    """GRPO's eight answers to a prompt need no other option to begin with."""
    from shardproof.train.options.rlhf_config import RlhfConfig

    assert RlhfConfig(**given).batch(ranks).micro == micro


def test_other_ranks_are_as_quiet_as_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers' Trainer sets all ranks but the first to warnings, unless it is told not to."""
    from transformers import TrainingArguments
    from transformers.utils import logging

    monkeypatch.setattr(TrainingArguments, "should_log", property(lambda self: False))
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        assert TrainingArguments(**told(tmp_path)).get_process_log_level() == logging.ERROR
    finally:
        logging.set_verbosity(before)


def test_a_model_may_lie_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `--model=~/m` as it is, and so does a file of options. Libraries took it for a name of the hub."""
    monkeypatch.setenv("HOME", "/home/me")
    config = RlhfConfig(model="~/m", reward_model=["~/judge", "org/judge"], ref_adapters="same", value_model="~/v")
    assert (config.model, config.value_model, config.ref_adapters) == ("/home/me/m", "/home/me/v", "same")
    assert config.reward_model == ["/home/me/judge", "org/judge"]
