"""A real vLLM server as the teacher of gkd and grpo, beside the same teacher in the process that trains."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm"),
]
OWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ROUNDING = 0.02  # vLLM's kernels; 2e-5 was seen in float32


@contextlib.contextmanager
def server(folder: Path, most: int, log: Path) -> Iterator[str]:
    """The address of one that gives so many log-probabilities at most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [
        "--port",
        str(port),
        "--max-logprobs",
        str(most),
        "--max-model-len",
        "128",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    with log.open("w") as told:
        running = subprocess.Popen(command, env=os.environ | OWN, stdout=told, stderr=told)
    try:
        while running.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(1)
        assert running.poll() is None, log.read_text()[-4000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(60)


def train(folder: Path, *options: str) -> list[dict[str, Any]]:
    """In this process, where all that takes long to import is."""
    from shardproof.cli.main import main

    code = main(["rlhf", "--output-dir", str(folder), *options])
    lines = (folder / "metrics.jsonl").read_text().splitlines() if code == 0 else []
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.timeout(1800)
def test_it_teaches_what_it_teaches_in_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.models.tiny import build_tiny

    rows = [{"query": f"what is {a} plus {b}?", "response": f"it is {a + b}"} for a in range(8) for b in range(4)]
    build_tiny(tmp_path / "model", [row["query"] for row in rows])
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "teacher")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"), "--max-steps", "3"]
    common += ["--learning-rate", "1e-3", "--max-length", "64", "--precision", "fp32"]
    gkd = [*common, "--rlhf-type", "gkd", "--lmbda", "0", "--gkd-logits-topk", "16", "--batch-size", "4"]
    grpo = [*common, "--rlhf-type", "grpo", "--num-generations", "1", "--max-completion-length", "8"]
    with server(tmp_path / "teacher", 16, tmp_path / "server.log") as address:
        for name, options in (("gkd", gkd), ("grpo", grpo)):
            here = train(tmp_path / f"{name}-here", *options, "--teacher-model", str(tmp_path / "teacher"))
            there = train(tmp_path / f"{name}-there", *options, "--teacher-model-server", address)
            assert len(here) == len(there) == 3
            for figure in ("loss", "grad_norm", "teacher_kl"):
                mine, its = ([step[figure] for step in steps if figure in step] for steps in (there, here))
                assert mine == pytest.approx(its, rel=ROUNDING, abs=1e-4), figure
        gkd[gkd.index("16")] = "17"
        assert not train(tmp_path / "more", *gkd, "--teacher-model-server", address)
        assert "--max-logprobs 17, or ask for fewer" in capfd.readouterr().err
