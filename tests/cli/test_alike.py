"""Promise: machines that differ in packages, code, options or weights are told apart, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardproof.cli.processes.alike import Machine, difference
from shardproof.cli.processes.machines import own_copies
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(300_000))
    return folder


def machine(model: Path, host: str = "node0", **options: object) -> Machine:
    config = SftConfig(model=str(model), **options)
    return Machine.here(config, config.models)._replace(host=host)


def test_the_same_is_the_same(model):
    assert difference(machine(model), machine(model, "node1", nproc=4, node_rank=1, debug=True)) == ""


def test_other_options_are_named(model):
    found = difference(machine(model), machine(model, "node1", learning_rate=2e-3))
    assert "node1 was given --learning-rate 0.002, node0 0.0001" in found


@pytest.mark.parametrize("name", ["transformers", "torchvision"])
def test_other_packages_are_named(model, name):
    first, other = machine(model), machine(model, "node1")
    other.versions[name] = "9.9"
    assert f"node1 has {name} 9.9, node0 has {first.versions[name]}" in difference(first, other)


@pytest.mark.parametrize("at", [3, 150_010, 299_990])
def test_other_weights_are_named(model, at):
    first = machine(model)
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at] = 1
    file.write_bytes(data)
    assert "model.safetensors differs" in difference(first, machine(model, "node1"))


def test_a_model_that_is_not_there_is_named(model):
    first = machine(model)
    (model / "config.json").unlink()
    assert "config.json differs, or one of them lacks it" in difference(first, machine(model, "node1"))
    shutil.rmtree(model)
    assert difference(first, machine(model, "node1")).startswith(f"node1 has no {model}, but node0 does.")


def test_other_reward_files_are_named(model, tmp_path):
    file = tmp_path / "rewards.py"
    config = RlhfConfig(rlhf_type="grpo", model=str(model), reward_funcs=["accuracy", f"{file}:same"])
    machines = []
    for host in ("node0", "node1"):
        file.write_text(f"def same(completions, **columns): return [{host!r} > 'a'] * len(completions)\n")
        machines.append(Machine.here(config, own_copies(config))._replace(host=host))
    assert difference(*machines).startswith(f"{file} on node1 is not the same as on node0")
