"""Promise: without --precision a run computes in bf16 on an accelerator that has it, and in fp32 elsewhere."""

from __future__ import annotations

import pytest
import torch

from shardproof.cli import demo, precision, training
from shardproof.cli.main import main
from shardproof.cli.training import parse
from shardproof.train.options.config import SftConfig
from shardproof.zero import device


@pytest.fixture
def with_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that looks as if it had an accelerator: torch is asked."""
    monkeypatch.setattr(precision, "NODES", ("null",))


def shown(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "verify"])
def test_more_processes_than_accelerators_are_refused(
    with_nodes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Before anything is read or started."""
    shown(monkeypatch, 2)
    assert main([command, "--nproc", "3", "--dataset", "nowhere.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "--nproc 3, but only 2 accelerator(s) are visible, and processes cannot share one." in said
    assert "--nproc 2" in said
    assert "nowhere.jsonl" not in said


@pytest.mark.parametrize(("count", "nproc"), [(2, 2), (2, 1), (0, 3)])
def test_as_many_processes_as_accelerators_are_not(
    with_nodes: None, monkeypatch: pytest.MonkeyPatch, count: int, nproc: int
) -> None:
    shown(monkeypatch, count)
    precision.check_devices(nproc)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "processes"), [(0, 2), (1, 1), (4, 2)])
def test_the_demo_takes_two_processes_where_they_find_devices(
    with_nodes: None, monkeypatch: pytest.MonkeyPatch, count: int, processes: int
) -> None:
    shown(monkeypatch, count)
    monkeypatch.setattr(training, "start", lambda config, given, ask: config.nproc)
    assert demo.run([]) == processes


def computes_in(*words: str) -> str:
    config, given = parse(SftConfig, "", words)
    assert ("precision" in given) == ("--precision" in words)
    return config.precision


def test_a_machine_without_an_accelerator_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision.subprocess, "run", lambda *args, **kwargs: pytest.fail("asked"))
    assert computes_in("--dataset", "stdlib") == "fp32"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has one")
def test_torch_finds_none(with_nodes: None) -> None:
    assert not device.has_bf16()
    assert computes_in("--dataset", "stdlib") == "fp32"


def test_torch_finds_one(with_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ASKED", "print(True)")
    assert computes_in("--dataset", "stdlib") == "bf16"
    assert computes_in("--precision", "fp32") == "fp32"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("emulates", [True, False])
def test_bf16_that_is_only_emulated_does_not_count(
    native: bool, emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_cuda(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", of_cuda if emulates else lambda: native)
    assert device.has_bf16() is native
