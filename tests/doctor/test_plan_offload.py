"""Promise: a plan with `--offload` tells what lies elsewhere and what moves there and back."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardproof
from distributed.two_devices import DEVICE, two_devices
from shardproof.cli.main import main
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.plan import make_plan

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MICRO, LENGTH = 2, 32
Way = tuple[int, str]  # the stage, and what is offloaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import Qwen2Config

    made = tmp_path_factory.mktemp("model")
    Qwen2Config(architectures=["Qwen2ForCausalLM"], **SHAPE).save_pretrained(made)
    return made


def elsewhere(ways: list[Way], folder: str) -> dict[Way, dict[str, float]]:
    """Real steps on two devices made of one: bytes at home when the optimizer steps, and what crosses in a step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardproof.zero.schedule.home import Home

    crossed = [0]
    bring, place = Home.bring, Home.place

    def brought(self, values, dtype):
        crossed[0] += values.nbytes
        return bring(self, values, dtype)

    def placed(self, values, dtype):
        here = place(self, values, dtype)
        crossed[0] += here.nbytes
        return here

    found = {}
    config = AutoConfig.from_pretrained(folder)
    for way in ways:
        stage, offload = way
        torch.manual_seed(0)
        with (
            two_devices(),
            mock.patch.object(Home, "bring", brought),
            mock.patch.object(Home, "place", placed),
        ):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
            for p in model.model.layers[0].parameters():
                p.requires_grad_(False)
            model = shardproof.shard(model, stage, device=DEVICE, offload=offload, mixed_precision=torch.bfloat16)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
            ids = torch.zeros(MICRO, LENGTH, dtype=torch.long, device=DEVICE)
            for _ in range(2):
                crossed[0] = 0
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                flats = model.__dict__["_shardproof"].flats
                gradients = sum(f.grad.nbytes for f in flats if f.grad is not None)
                at_home = [f for f in flats if f.home is not None and f.home.frozen and f.source is not None]
                casts = sum(f.source[1].nbytes for f in at_home if f.source[1] is not f.shard)
                optimizer.zero_grad()
            shards = sum(f.shard.nbytes for f in flats if f.home is not None)
            states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        found[way] = {"home": shards + casts + gradients + sum(t.nbytes for t in states), "crossed": crossed[0]}
    return found


def planned(ways: list[Way], folder: Path, world: int) -> dict[Way, dict[str, float]]:
    """The same, imagined, with the first block frozen."""
    from shardproof.doctor.planning.blocks import Blocks
    from shardproof.doctor.planning.imagine import Rank
    from shardproof.doctor.planning.ledger import HOME
    from shardproof.doctor.planning.stand_ins import fake_group
    from shardproof.doctor.planning.subject import meta_model

    found = {}
    config = PlanConfig(model=str(folder))
    for stage, offload in ways:
        model = meta_model(config)
        for p in model.model.layers[0].parameters():
            p.requires_grad_(False)
        with fake_group(world):
            rank = Rank(model, config, stage, Blocks(), offload)
            rank.step(MICRO, LENGTH)
            step = rank.step(MICRO, LENGTH)
        home = max(float(columns[HOME].max()) for columns in step.segments.values())
        found[stage, offload] = {"home": home, "crossed": step.moved.crossed}
    return found


ALL: list[Way] = [(stage, offload) for stage in (0, 3) for offload in ("optimizer", "all")]


@pytest.mark.parametrize(
    ("world", "ways"),
    [(1, [(3, "all")]), *(pytest.param(world, ALL, marks=pytest.mark.slow) for world in (1, 2))],
    ids=["short", "1", "2"],
)
def test_what_lies_elsewhere_and_what_crosses_is_what_a_real_run_keeps_and_moves(run, folder, world, ways):
    real, told = run(world, elsewhere, ways, str(folder))[0], planned(ways, folder, world)
    for way in ways:
        assert told[way] == pytest.approx(real[way], rel=0.01), way
        assert real[way]["crossed"] > 0


@pytest.mark.slow
def test_what_is_offloaded_is_not_on_the_device(folder):
    """And a home that is too small does not fit."""
    sizes = {"gpus": [1, 2, 512], "per_device_batch_size": [1], "max_length": [LENGTH], "stage": "0,3"}
    offloads = ["none", "optimizer", "all", "nvme"]
    plan = make_plan(PlanConfig(model=str(folder), offload=offloads, gradient_checkpointing=["no"], **sizes))
    at = {(c.stage, c.world, c.offload): c for c in plan.candidates}
    assert len(at) == 2 * 3 * 4
    for stage, world in ((0, 1), (0, 2), (3, 2), (3, 512)):
        usual, some, all_, disk = (at[stage, world, offload] for offload in offloads)
        states = 8 * plan.trainable / (world if stage else 1)
        assert usual.home == usual.crossed == some.held["optimizer"] == all_.held["weights"] - some.held["weights"] == 0
        assert some.home == pytest.approx(2 * states, rel=0.02)  # weights, gradients, two states; padded
        assert some.peak < usual.peak - 0.9 * states
        assert (disk.home, disk.held) == (all_.home, all_.held)
        assert disk.seconds > all_.seconds > usual.seconds
    tight = make_plan(PlanConfig(model=str(folder), offload=["all"], host_memory=0.001, **sizes))
    assert {c.world for c in tight.fitting} == {512}


def test_the_command_shows_it(folder, capsys):
    rows = ["--per-device-batch-size", "1", "--max-length", "32", "--stage", "3", "--gpus", "8"]
    argv = ["plan", "--model", str(folder), *rows, "--gradient-checkpointing", "no", "--offload", "none", "all"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "to and fro" in text
    assert "tokens/s" in text  # at 80 characters, too
    assert "\n3      all " in text
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert [c["offload"] for c in found] == ["none", "all"]
    assert found[1]["home"] > 0
    assert main([*argv, "--device", "cpu"]) == 2
    assert "--offload" in capsys.readouterr().err
