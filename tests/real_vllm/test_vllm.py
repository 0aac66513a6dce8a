"""GRPO with a real vLLM in the processes that train, and what it holds of the weights that it is given."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from real_vllm.weights import KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm"),
]
ROUNDING = 0.02  # vLLM computes in bfloat16, and the model that trains in float32: 0.002 was seen


def python(*arguments: str) -> str:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_what_it_would_read_from_files(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for experts, whose kernels on the CPU keep them in an order of their own when they are read first."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for how in ("given", "read"):
        python(str(Path(__file__).with_name("weights.py")), how, kind, str(tmp_path))
    before, given, read = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "given", "read"))
    assert [name for name in before if torch.equal(given[name], before[name])] == []
    odd = [name for name in read if not torch.equal(given[name], read[name])]
    assert [name for name in odd if not re.search(r"experts\.w(13|2)_weight$", name)] == []
    assert len(read) > 10


REWARD = """
def uneven(completions, completion_ids, **columns):
    return [sum(token % 7 for token in ids) / 10 for ids in completion_ids]
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc", "1", "--batch-size", "4"],
        ["--nproc", "2", "--batch-size", "2", "--stage", "3"],
        ["--nproc", "2", "--batch-size", "2", "--stage", "2", "--tuner", "lora"],
        ["--nproc", "2", "--batch-size", "2", "--stage", "3", "--vllm-tensor-parallel-size", "2"],
    ],
    ids=["one", "two", "lora", "shared"],
)
def test_it_answers_with_the_weights_of_each_step(tmp_path: Path, options: list[str]) -> None:
    """What vLLM says of its answers' chances is what the model says that trains, though its weights move far."""
    from shardproof.models.tiny import build_tiny

    questions = [f"what is {a} plus {b}?" for a in range(8) for b in range(4)]
    model = build_tiny(tmp_path / "model", questions)
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["-m", "shardproof", "rlhf", "--rlhf-type", "grpo", "--model", str(model)]
    command += ["--dataset", str(tmp_path / "rows.jsonl"), "--reward-funcs", f"{tmp_path / 'rewards.py'}:uneven"]
    command += ["--num-generations", "4", "--max-steps", "3", "--learning-rate", "1e-2", "--max-length", "64"]
    command += ["--max-completion-length", "8", "--use-vllm", "--vllm-mode", "colocate"]
    python(*command, "--output-dir", str(tmp_path / "run"), *options)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    apart = [step["sampling/sampling_logp_difference/mean"] for step in steps if "loss" in step]
    assert len(apart) == 3
    assert max(apart) < ROUNDING


def test_it_answers_rows_as_the_model_itself_does(tmp_path: Path) -> None:
    """Also where answers are cut at a word, and differently each time where they are drawn; and of packed weights."""
    words = ["red", "green", "blue", "seven", "eight", "nine", "north", "south"]
    rows = [
        {"query": f"say {word} {i}", "response": f"{word} and {word} once more"} for i in range(20) for word in words
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["-m", "shardproof", "sft", "--model", "tiny", "--dataset", str(tmp_path / "rows.jsonl")]
    python(*made, "--max-steps", "100", "--learning-rate", "3e-3", "--output-dir", str(tmp_path / "run"))
    asked = ["--dataset", f"{tmp_path / 'rows.jsonl'}#24", "--max-new-tokens", "8"]

    def answers(name: str, *more: str, of: str = "run") -> list[str]:
        file = tmp_path / f"{name}.jsonl"
        python("-m", "shardproof", "infer", str(tmp_path / of), *asked, "--result-path", str(file), *more)
        return [json.loads(line)["response"] for line in file.read_text().splitlines()]

    own = answers("own", "--batch-size", "8")
    assert answers("vllm", "--backend", "vllm") == own
    longest = max(range(len(own)), key=lambda i: len(own[i]))
    word = own[longest][2:5]
    assert len(word) == 3
    cut = answers("cut", "--backend", "vllm", "--stop-words", word)
    assert cut[longest] == own[longest].partition(word)[0].strip()
    drawn = ["--backend", "vllm", "--temperature", "1.5", "--seed", "3"]
    once, again = (answers(name, *drawn) for name in ("once", "again"))
    assert once == again != own
    python("-m", "shardproof", "export", str(tmp_path / "run"), str(tmp_path / "packed"), "--quantize", "fp8")
    of_packed = answers("packed_own", "--batch-size", "8", of="packed")
    assert answers("packed_vllm", "--backend", "vllm", of="packed") == of_packed
