"""Counting operations under the Trainer's mixin: the number is Trainer's, and parameters are gone through once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardproof.integrations.transformers import sharded


class Counting(LlamaForCausalLM):
    asked = 0

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        type(self).asked += 1
        return super().num_parameters(*args, **kwargs)


class CountsByItself(Trainer):
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return int(inputs["input_ids"].sum())


class Rows(torch.utils.data.Dataset):
    """Longer and longer ones."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(1, 5 + i)
        return {"input_ids": ids, "labels": ids}


def counted(trainer: type[Trainer], folder: Path) -> float:
    """The operations of four steps."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Counting(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    arguments: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments |= {"max_steps": 4, "per_device_train_batch_size": 1}
    runs = trainer(model=model, args=TrainingArguments(str(folder), **arguments), train_dataset=Rows())
    runs.train()
    return runs.state.total_flos


@pytest.mark.sampled
@pytest.mark.parametrize("trainer", [Trainer, CountsByItself])
def test_the_operations_are_those_of_trainer(tmp_path: Path, trainer: type[Trainer]) -> None:
    assert counted(sharded(trainer), tmp_path) == counted(trainer, tmp_path) > 0


def test_parameters_are_counted_once(tmp_path: Path) -> None:
    Counting.asked = 0
    counted(sharded(Trainer), tmp_path)
    assert Counting.asked == 1
