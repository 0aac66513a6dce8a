"""Promise: a pasted error text of a known kind is explained, whoever raised it; any other text says that it is not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from shardproof.casebook.case import all_cases
from shardproof.cli.main import main
from shardproof.doctor.explain import explain
from shardproof.doctor.known.errors import KNOWN

ROOT = Path(__file__).parents[2]

# Lines as these libraries print them, and which failure each is.
LINES = {
    "error: rank 1 was ended by SIGKILL.": "a process was killed",
    "RuntimeError: Tensors must be CUDA and dense": "a tensor of the CPU over NCCL",
    "AssertionError: The parameter 447 has already been reduced. Gradient computed twice for this partition. "
    "Multiple gradient reduction is currently not supported": "gradient reduced twice",
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
    "... Parameter at index 7 has been marked as ready twice.": "parameter marked ready twice",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.": (
        "unused parameters"
    ),
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1422, OpType=_ALLGATHER_BASE, "
    "Timeout(ms)=1800000) ran for 1800113 milliseconds before timing out.": "ranks wait for each other",
    "RuntimeError: Function SumBackward0 returned an invalid gradient at index 0 - got [0] but expected shape "
    "compatible with [8, 4096]": "gradient of size zero",
    "RuntimeError: 'weight' must be 2-D": "weight must be 2-D",
    "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor": (
        "mixed plain and distributed tensors"
    ),
    "AssertionError: backward pass is invalid for module in evaluation mode": "backward in evaluation mode",
    "RuntimeError: tracing error at step 0: \nmodule id: 0, training: True\nexpected the next 1 parameters in the "
    "parameter fetch queue to be ({'id': 3, 'status': 'AVAILABLE'},)": "stale prefetch",
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32": (
        "flat buffer of one dtype"
    ),
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!": (
        "tensors on two devices"
    ),
    "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'": "CPUAdam was not built",
    "AttributeError: 'Parameter' object has no attribute 'ds_status'": "a parameter made anew",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : "
    "rank 1 and rank 0 both on CUDA device 10": "two ranks on one GPU",
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:1691, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.25.1\nncclSystemError: System call (e.g. socket) or "
    "external library call failed or device error.": "NCCL cannot use the network",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running: CollectiveFingerPrint": (
        "ranks wait for each other"
    ),
    "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms": "ranks wait for each other",
    "ValueError: `FlatParameter` requires uniform `requires_grad`": "flat buffer of one dtype",
    "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.": (
        "weights that are not gathered"
    ),
    "RuntimeError: still have inflight params [{'id': 723, 'status': 'AVAILABLE', 'numel': 4194304}]": (
        "parameters still in flight"
    ),
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": (
        "the loss scale is at its minimum"
    ),
    "RuntimeError: Error building extension 'cpu_adam'": "CPUAdam was not built",
    "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 6248)": (
        "a process was killed"
    ),
    "RuntimeError: CUDA error: device-side assert triggered": "an index outside of a table",
    "[W socket.cpp:464] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).": (
        "a port is taken"
    ),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.": "out of memory",
    "[ERROR] [launch.py:434:sigkill_handler] ['python', '-u', 'main.py'] exits with return code = -9": (
        "a process was killed"
    ),
    "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.": (
        "a process was killed"
    ),
    "ValueError: Attempting to unscale FP16 gradients.": "weights in fp16 under a loss scale",
    "AttributeError: 'DistributedDataParallel' object has no attribute 'generate'": (
        "a method of the model inside a wrapper"
    ),
    "RuntimeError: No backend type associated with device type cpu": "a tensor of the CPU over NCCL",
    "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.": (
        "ranks that never meet at the start"
    ),
    "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:": (
        "two configurations that contradict each other"
    ),
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).": (
        "too little shared memory"
    ),
    "AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to "
    "`False`": "an inner module that took itself for the root",
    "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they "
    "have already been freed).": "backward twice through one graph",
    "ValueError: Target modules {'c_attn'} not found in the base model. Please check the target modules and try "
    "again.": "adapters without a place",
    "RuntimeError: CUDA error: invalid device ordinal": "more processes than GPUs",
}


@pytest.mark.parametrize(("line", "name"), LINES.items(), ids=LINES.values())
def test_a_line_in_a_long_log_is_found(line, name):
    log = "Traceback (most recent call last):\n" * 50 + f"[rank1]: {line}\n" + "srun: error: task 3 exited\n" * 50
    first = explain(log)[0]
    assert first.known.name == name
    assert first.line.removeprefix("[rank1]: ") in line


def test_other_texts_are_not(capsys):
    assert explain("KeyError: 'messages'") == []
    assert explain("Loss 0.41, gradient norm 1.2, all tensors on device cuda:0") == []
    assert main(["explain", "KeyError: 'messages'"]) == 1
    assert "No known failure" in capsys.readouterr().err


def test_the_command_tells_what_it_means_and_what_to_do(capsys, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("RuntimeError: 'weight' must be 2-D\n")
    assert main(["explain", "--file", str(log)]) == 0
    out = capsys.readouterr().out
    for word in ("seen:", "means:", "why:", "there:", "here:", "threads:", "huggingface/trl#669", "unwrapped_model"):
        assert word in out
    assert main(["explain", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(KNOWN)
    assert main(["explain", "--file", str(tmp_path / "none")]) == 2


def test_the_list_keeps_names_and_engines_apart(capsys):
    assert main(["explain", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line) for line in lines] == [[known.name, known.engines] for known in KNOWN]


def test_each_entry_is_whole():
    threads = re.compile(r"[\w.-]+/[\w.-]+#\d+")
    for known in KNOWN:
        assert all((known.means, known.why, known.there, known.here, known.threads)), known.name
        assert all(threads.fullmatch(t) for t in known.threads), known.name
        assert set(known.cases) <= set(all_cases()), known.name
    assert len({known.name for known in KNOWN}) == len(KNOWN)


def test_most_errors_that_peers_raise_in_the_casebook_are_explained():
    cases = json.loads((ROOT / "casebook.json").read_text())["cases"]
    texts = [r["text"] for case in cases for r in case["results"] if r["status"] == "error"]
    known = [text for text in texts if explain(text)]
    assert len(known) >= 0.75 * len(texts)


def test_a_pipe_that_is_closed_early_is_no_error():
    """`shardproof explain --list | head -1`."""
    import os
    import subprocess
    import sys

    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "shardproof.cli", "explain", "--list"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_text_with_bytes_that_are_no_utf_8_is_read_all_the_same(monkeypatch, tmp_path):
    """As logs have them, piped or in quotes, where Python is strict about what it reads and writes."""
    text, strict = b"caf\xe9 RuntimeError: 'weight' must be 2-D\n", {"encoding": "utf-8", "errors": "strict"}
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "log").write_bytes(text)
    for words in ([], [text.decode("utf-8", "surrogateescape")], ["--file=~/log"]):
        out = io.TextIOWrapper(io.BytesIO(), **strict)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), **strict))
        monkeypatch.setattr("sys.stdout", out)
        assert main(["explain", *words]) == 0
        assert b"means:" in out.buffer.getvalue()


def test_one_text_is_explained_at_a_time(capsys, tmp_path):
    assert main(["explain", "an error", "--file", "log"]) == 2
    assert "--file log and TEXT cannot be used together" in capsys.readouterr().err
