"""What all ranks write together is what `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from zero.language_models import PROMPT, lora, tiny

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


@pytest.mark.parametrize(("family", "stage"), [("Qwen3", 3), ("Llama", 3), ("Llama", 0), ("Qwen3Moe", 3)])
def test_from_pretrained_loads_it(run2: Run, tmp_path: Path, family: str, stage: int) -> None:
    """Nothing is missing, nothing is there twice, every bit is right, and files are of the size that was asked for;
    experts lie apart in them."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "model.safetensors").write_bytes(b"of an earlier save, in one file")
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


def save_in_pieces(folder: str) -> None:
    from shardproof.checkpoint import weights

    with mock.patch.object(weights, "CHUNK", 100):
        assert save_streamed("Llama", 3, folder)


def test_a_weight_of_many_pieces(run2: Run, tmp_path: Path) -> None:
    """As a large one is written."""
    from transformers import AutoModelForCausalLM

    run2(save_in_pieces, str(tmp_path))
    torch.manual_seed(0)
    expected = tiny("Llama", tie_word_embeddings=False).state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_files_are_as_large_as_was_asked_for_and_what_is_in_them_is_aligned() -> None:
    """But for a tensor that is larger than a file."""
    from shardproof.checkpoint.parts import Part
    from shardproof.checkpoint.weights import _plan

    sizes = {"bytes": 3, "a": 10, "b": 15, "c": 5, "d": 90, "e": 5, "steps": 1}
    dtypes = dict.fromkeys(sizes, torch.float32) | {"bytes": torch.uint8, "steps": torch.int64}
    parts = [Part(name, (n,), 0, torch.zeros(n, dtype=dtypes[name]), True) for name, n in sizes.items()]
    files = _plan(parts, dtypes, 80)
    assert [sorted(file.places) for file in files] == [["a", "bytes"], ["b", "c"], ["d"], ["e", "steps"]]
    assert [file.size - len(file.header) for file in files] == [43, 80, 360, 28]
    for file in files:
        assert all(at % file.dtypes[name].itemsize == 0 for name, at in file.places.items())


def save_relative(folder: str) -> None:
    import os

    import shardproof
    from shardproof.integrations.weights import stream_weights

    rank, before = torch.distributed.get_rank(), Path.cwd()
    place = Path(folder, f"begun{rank}")
    place.mkdir()
    torch.manual_seed(0)
    model = shardproof.shard(tiny("Llama"), 3)
    os.chdir(place)
    try:
        assert stream_weights(model, Path("out"), 10**9)
    finally:
        os.chdir(before)


def test_a_relative_folder_is_that_of_rank_0(run2: Run, tmp_path: Path) -> None:
    """Launchers of one machine may have been begun in different folders."""
    from safetensors.torch import load_file

    run2(save_relative, str(tmp_path))
    assert not list((tmp_path / "begun1").iterdir())
    torch.manual_seed(0)
    expected = tiny("Llama").state_dict()
    for name, value in load_file(tmp_path / "begun0" / "out" / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name


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


@pytest.mark.parametrize(("family", "tied"), [("Qwen3", True), ("Llama", False), ("Qwen3Moe", False)])
def test_the_tensors_are_those_of_save_pretrained(tmp_path: Path, family: str, tied: bool) -> None:
    """Tied weights once, under the name that is read again; experts one by one."""
    from safetensors.torch import load_file

    from shardproof.integrations.weights import places_in_model

    model = tiny(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    saved, entries, places = load_file(tmp_path / "model.safetensors"), model.state_dict(), places_in_model(model)
    assert places is not None
    assert set(places) == set(saved)
    for name, place in places.items():
        values = entries[place.entry].flatten()[place.first :][: saved[name].numel()]
        assert torch.equal(values.view(place.shape), saved[name]), name


def test_what_files_hold_in_another_form_is_left_to_save_pretrained() -> None:
    """Adapters, of which PEFT knows what to write."""
    from shardproof.integrations.weights import places_in_model

    assert places_in_model(lora("Llama")) is None


def test_rows_in_another_order_are_left_to_save_pretrained(tmp_path: Path) -> None:
    """Of the towers of Kimi K2.5 and Step 3.7 files have queries and keys in the order of another rotation: a run ended
    where it was to save, and all that it had learnt was lost."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    from shardproof.integrations.weights import places_in_model

    vision = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    text = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Kimi_K25Config(
        text_config={**text, "num_attention_heads": 2, "vocab_size": 32},
        vision_config={**vision, "pos_emb_height": 2, "pos_emb_width": 2},
        projection_hidden_size=16,
    )
    Kimi_K25ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert places_in_model(Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path)) is None


def save_on_one_rank(folder: str) -> list[float]:
    """Rank 0 saves in mid-training, where rank 1 does not."""
    import shardproof

    torch.manual_seed(0)
    model = shardproof.shard(tiny("Qwen3", tie_word_embeddings=True), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if step == 1 and torch.distributed.get_rank() == 0:
            model.save_pretrained(folder)
        loss = model(input_ids=PROMPT, labels=PROMPT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 0 and (weights := shardproof.full_state_dict(model)):
            torch.save(weights, f"{folder}.pt")
    return losses


def test_save_pretrained_on_one_rank_while_the_others_train(run2: Run, tmp_path: Path) -> None:
    """It writes whole weights, those of the step at hand, and training goes on as if nothing had been."""
    from transformers import AutoModelForCausalLM

    first, second = run2(save_on_one_rank, str(tmp_path / "saved"))
    assert first == second
    expected = torch.load(tmp_path / "saved.pt")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


ALONE = """
import os, torch, torch.distributed as dist, shardproof
from transformers import Qwen3Config, Qwen3ForCausalLM

dist.init_process_group("gloo")
sizes = dict(hidden_size=16, intermediate_size=20, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
config = Qwen3Config(vocab_size=50, num_hidden_layers=2, **sizes)
model = shardproof.shard(Qwen3ForCausalLM(config), 3, desync_timeout=3.0)
if dist.get_rank() == 0:
    model.save_pretrained(FOLDER)
else:
    dist.barrier()
"""


@pytest.mark.slow
def test_save_pretrained_on_one_rank_raises_where_the_others_wait(tmp_path: Path) -> None:
    """In place of a hang; with who waits where."""
    import subprocess
    import sys

    script = tmp_path / "save.py"
    script.write_text(ALONE.replace("FOLDER", repr(str(tmp_path / "saved"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "in torch.distributed.barrier, called at" in done.stderr
    assert "rank 0 waits for rank 1 to gather" in done.stderr, done.stderr
