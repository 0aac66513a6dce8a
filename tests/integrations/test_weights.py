"""What all ranks write together is what `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zero.language_models import lora, tiny

Run = Callable[..., list[Any]]


def save_streamed(family: str, stage: int, folder: str) -> bool:
    """Returns whether it was streamed."""
    import shardproof
    from shardproof.integrations.weights import stream_weights

    torch.manual_seed(0)
    model = shardproof.shard(tiny(family, tie_word_embeddings=family == "Qwen3"), stage)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict={})
    return stream_weights(model, Path(folder), 4000)


@pytest.mark.parametrize(("family", "stage"), [("Qwen3", 3), ("Llama", 3), ("Llama", 0)])
def test_from_pretrained_loads_it(run2: Run, tmp_path: Path, family: str, stage: int) -> None:
    """Nothing is missing, nothing is there twice, every bit is right, and files are of the size that was asked for."""
    from transformers import AutoModelForCausalLM

    assert run2(save_streamed, family, stage, str(tmp_path)) == [True, True]
    torch.manual_seed(0)
    expected = tiny(family, tie_word_embeddings=family == "Qwen3")
    got, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, value in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert sum(file.stat().st_size > 8000 for file in files) == 0


def save_in_bf16(folder: str) -> None:
    import shardproof
    from shardproof.integrations.weights import note_dtype, stream_weights

    torch.manual_seed(0)
    model = shardproof.shard(tiny("Llama"), 3)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict={})
        note_dtype(Path(folder), torch.bfloat16)
    assert stream_weights(model, Path(folder), 4000, torch.bfloat16)


def test_in_another_dtype(run2: Run, tmp_path: Path) -> None:
    """Rounded on the way to the file; config.json names it, and the index counts its bytes."""
    import json

    from transformers import AutoModelForCausalLM

    run2(save_in_bf16, str(tmp_path))
    torch.manual_seed(0)
    expected = tiny("Llama").bfloat16().state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert got.dtype == torch.bfloat16
    for name, value in expected.items():
        assert torch.equal(got.state_dict()[name], value), name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in expected.values())


def test_the_names_are_those_of_save_pretrained(tmp_path: Path) -> None:
    """Tied weights once, under the name that is read again."""
    from safetensors.torch import load_file

    from shardproof.integrations.weights import names_in_files

    for family, tied in (("Qwen3", True), ("Llama", False)):
        model = tiny(family, tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / family)
        assert set(names_in_files(model) or ()) == set(load_file(tmp_path / family / "model.safetensors"))


def test_what_files_hold_in_another_form_is_left_to_save_pretrained() -> None:
    """Adapters, and experts that are taken apart when they are written."""
    from shardproof.integrations.weights import names_in_files

    assert names_in_files(lora("Llama")) is None
    assert names_in_files(tiny("Qwen3Moe")) is None
