"""The benchmarks run, and what they hold against a reference agrees. Times are never asserted."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", BENCHMARKS / script, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", [["full"], ["lora"], ["checkpointed"], ["full", "--together", "2"]])
def test_every_engine_follows_one_process_and_is_timed(tmp_path: Path, case: list[str]) -> None:
    engines = ["alone", "fsdp2", "ours-0", "ours-3"]
    report = tmp_path / "times.json"
    options = ["--model", "tiny", "--batch", "1", "--length", "8", "--rounds", "2", "--json", str(report)]
    table = run("step_time.py", *options, "--engines", *engines, "--case", *case)
    found = json.loads(report.read_text())["engines"]
    assert list(found) == engines
    assert all(engine in table for engine in engines)
    assert all(len(found[engine]["wall_s"]) == 2 for engine in engines)
    assert max(found[engine]["loss_error"] for engine in engines[1:]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--case", "lora", "--nodes", "0"]])
def test_the_python_of_each_engine_is_timed(options: list[str]) -> None:
    table = run("host.py", "--layers", "2", "--rounds", "2", *options)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| plain", "| autocast", "| fsdp2", "| ours-0", "| ours-3"]
    assert rows[0][2] == "1.00"
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.slow
def test_padding_is_timed_where_all_have_one_loss() -> None:
    table = run("padding.py", "--model", "tiny", "--rows", "3", "--longest", "16", "--rounds", "2")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| sdpa, padded", "| padded", "| padding-free", "| packed"]
    assert rows[0][2] == "1.00 |"
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.slow
def test_attention_of_documents_is_timed_where_both_have_one_loss() -> None:
    table = run("documents.py", "--documents", "3", "--length", "8", "--rounds", "2")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [
        ["| Qwen3", "sdpa"],
        ["| Qwen3", "varlen"],
        ["| GptOss", "eager"],
        ["| GptOss", "varlen"],
    ]
    assert all(float(row[3].rstrip(" |")) > 0 for row in rows)


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("throughput")


def tiny(throughput: Any, case: str) -> Any:
    sizes = {"rows": 1, "accumulate": 2, "length": 32, "documents": 3, "attn": "sdpa"}
    return throughput.Setting(engine="plain", model="tiny", case=case, **sizes, rate=0.01, steps=2, warm=1)


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["full", "lora"])
def test_engines_of_one_accelerator_train_the_same_model(throughput: Any, case: str) -> None:
    setting = tiny(throughput, case)
    told = {
        name: throughput.train_by_hand(dataclasses.replace(setting, engine=name), torch.device("cpu"))
        for name in ("plain", "ours-0", "ours-3")
    }
    for name, found in told.items():
        assert len(found["losses"]) == 3
        assert throughput.check(name, found["losses"], "plain", told["plain"]["losses"], 1e-3) < 1e-3
    still = throughput.train_by_hand(dataclasses.replace(setting, rate=0.0), torch.device("cpu"))
    with pytest.raises(SystemExit, match="still does not train the same model"):
        throughput.check("still", still["losses"], "plain", told["plain"]["losses"], 1e-3)


@pytest.mark.parametrize("case", ["full", "lora"])
def test_operations_are_those_of_the_matrices_of_the_model(throughput: Any, case: str) -> None:
    setting = tiny(throughput, case)
    model = throughput.build(setting, torch.device("cpu"), torch.float32)
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    matrices = sum(w.numel() * (6 if w.requires_grad else 4) for w in linear)
    pairs = 2 * (10 * 11 / 2) + 12 * 13 / 2  # documents of 10, 10 and 12 tokens
    shape = setting.shape
    assert throughput.operations(setting) == matrices + 12 * shape.layers * shape.hidden * pairs / 32


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--offload", "--nvme", "."]])
def test_every_engine_of_one_accelerator(tmp_path: Path, options: list[str]) -> None:
    report = tmp_path / "throughput.json"
    sizes = ["--rounds", "1", "--steps", "1", "--warm", "1", "--length", "32", "--json", str(report)]
    table = run("throughput.py", *options, *sizes)
    engines = json.loads(report.read_text())["engines"]
    wanted = (
        ["ours-3", "ours-optimizer", "ours-all", "ours-nvme", "fsdp2-offload"] if options else ["plain", "autocast"]
    )
    assert set(wanted) <= set(engines)
    assert len(engines) >= 5
    assert all(engine["fits"] and engine["mfu"] > 0 for engine in engines.values())
    if not torch.accelerator.is_available():
        assert "mean nothing for a GPU" in table


@pytest.mark.slow
def test_an_engine_that_fails_leaves_the_others_their_time(tmp_path: Path) -> None:
    """A card is there for minutes."""
    report = tmp_path / "throughput.json"
    sizes = ["--rounds", "2", "--steps", "1", "--warm", "1", "--length", "32", "--json", str(report)]
    engines = ["--offload", "--nvme", "/not/here", "--engines", "ours-nvme", "ours-all"]
    script = [sys.executable, "-W", "ignore", BENCHMARKS / "throughput.py", *engines, *sizes]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "round 2, ours-all" in done.stdout
    assert "round 2, ours-nvme" not in done.stdout
    assert "| ours-nvme | failed" in done.stdout
    assert "failed, see above: ours-nvme" in done.stderr
    found = json.loads(report.read_text())
    assert found["engines"]["ours-all"]["mfu"] > 0
    assert "No such file or directory" in found["told"]["ours-nvme"][0]["failed"]


def test_losses_that_become_nan_are_not_those_of_the_model(throughput: Any) -> None:
    with pytest.raises(SystemExit, match="does not train the same model"):
        throughput.check("ours-0", [1.0, float("nan")], "plain", [1.0, 1.0], 1e-3)


def test_the_loss_in_parts_is_that_of_all_logits(throughput: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 has no function for it, and the logits of a large model take what is left of a card."""
    qwen = importlib.import_module("qwen")
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    monkeypatch.setattr(qwen, "PART", 16)
    hidden, head = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (50, 300))
    targets = torch.randint(300, (50,)).masked_fill(torch.arange(50) % 7 == 0, -100)
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, targets)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss = qwen.mean_loss(hidden, head, targets)
    assert max(saved) <= head.numel()
    torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    both = (torch.autograd.grad(each, (hidden, head)) for each in (loss, expected))
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_bytes_held_are_those_of_the_formula() -> None:
    # On a small model activations weigh more than on the 100 M of the real run, so the bound is wider.
    table = run("memory.py", "--model", "tiny", "--world", "2", "--stages", "3", "--tolerance", "0.5")
    exact = [line for line in table.splitlines() if line.startswith(("| parameters", "| optimizer", "| gradients"))]
    assert len(exact) == 3
    assert all(abs(float(line.split("|")[4].rstrip("% "))) < 5 for line in exact), table


@pytest.mark.slow
def test_what_each_engine_needs_at_most(tmp_path: Path) -> None:
    report = tmp_path / "peaks.json"
    options = ["--model", "256x4", "--batch", "1", "--length", "8", "--json", str(report)]
    table = run("peaks.py", "--engines", "ddp", "ours-0", "ours-3", *options)
    found = json.loads(report.read_text())
    assert list(found) == ["ddp", "ours-0", "ours-3"]
    whole = 4 * (2 * 8192 * 256 + 4 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256)  # bytes of the parameters
    assert found["ddp"]["tensors"] > 4 * whole  # weights, gradients, and two values of AdamW's
    assert found["ours-3"]["tensors"] < found["ours-0"]["tensors"]
    assert "| ddp 0." in table


@pytest.mark.slow
def test_collectives_prints_a_table() -> None:
    table = run("collectives.py", "--world", "2", "--mb", "1", "--rounds", "2")
    assert "isend/irecv" in table


@pytest.mark.slow
def test_trainers_with_each_engine_follow_one_process(tmp_path: Path) -> None:
    report = tmp_path / "times.json"
    options = ["--model", "tiny", "--batch", "1", "--length", "8", "--rounds", "1", "--steps", "5"]
    engines = ["ddp", *(["deepspeed-3"] if find_spec("deepspeed") else []), "ours-0", "ours-3"]
    table = run("trainers.py", *options, "--engines", *engines, "--json", str(report))
    assert list(json.loads(report.read_text())["medians_s"]) == engines
    assert "| ours-3" in table


@pytest.mark.slow
def test_growth_prints_a_line_for_each_number_of_ranks() -> None:
    table = run("growth.py", "--of", "ranks", "--model", "tiny", "--rounds", "2", "--engines", "ours-3", "--most", "2")
    assert "| ranks | alone, ms | ours-3, ms | ours-3 / alone |" in table
    assert [line[:4] for line in table.splitlines() if line.startswith(("| 1", "| 2"))] == ["| 1 ", "| 2 "]


@pytest.mark.slow
def test_what_the_engine_remembers_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    report = tmp_path / "scaling.json"
    options = ["--worlds", "64", "4096", "--sizes", "1e9", "--steps", "1", "--json", str(report)]
    run("scaling.py", "--only", "imagined", *options)
    few, many = json.loads(report.read_text())["imagined"]
    assert many["slice"] == pytest.approx(few["slice"] / 64, rel=0.01)
    assert many["kept"] < 1.02 * few["kept"], (few, many)


@pytest.mark.slow
def test_ranks_on_this_machine_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "scaling.json"
    run("scaling.py", "--only", "here", "--here", "1", "2", "--steps", "1", "--json", str(report))
    alone, two = json.loads(report.read_text())["here"]
    assert (alone["words"], two["state"]) == (0, pytest.approx(alone["state"] / 2, rel=0.01))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--missing"]])
def test_loading_needs_a_shard_and_a_unit(options: list[str]) -> None:
    """It ends with an error if it needs more, or if weights differ. A fresh process has no room in its heap yet."""
    sizes = ["--hidden", "512", "--layers", "10", "--vocabulary", "4096", "--world", "2"]
    table = run("loading.py", *sizes, *options)
    assert "| ours |" in table
