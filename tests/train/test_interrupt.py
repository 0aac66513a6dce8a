"""What Ctrl-C and other signals do to a run: a real signal to real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ENDLESS = 100_000
LIMIT = 180  # seconds for a line to come


class Running:
    """`shardproof` in a process group of its own, as a shell starts it."""

    def __init__(self, argv: list[str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardproof", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            process_group=0,
        )
        self.said = ""

    def read_until(self, beginning: str) -> None:
        """Read its output up to a line that begins so. If none comes, the stacks of all its processes are told."""
        stdout = self.process.stdout
        timer = threading.Timer(LIMIT, os.killpg, (self.process.pid, signal.SIGABRT))
        timer.start()
        try:
            for line in stdout or ():
                self.said += line
                if line.strip().startswith(beginning):
                    return
        finally:
            timer.cancel()
        pytest.fail(f"no line began with {beginning!r}:\n{self.said}\n{self.process.communicate()[1]}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, self.said + out, err

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def alone(self) -> bool:
        """Whether no process of the group is left."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts commands; none of them outlives the test, however it ends."""
    started: list[Running] = []

    def _start(*argv: str) -> Running:
        started.append(Running(list(argv), tmp_path))
        return started[-1]

    yield _start
    for running in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)


@pytest.fixture
def start(command: Callable[..., Running], tiny: Path, rows: Path) -> Callable[..., Running]:
    """A run that would take hours."""
    fixed = ["--model", str(tiny), "--dataset", str(rows), "--max-steps", str(ENDLESS)]
    return functools.partial(command, "sft", *fixed)


def check_stopped(running: Running, folder: Path, code: int) -> None:
    """The run ended after a step, said so, and left the weights of that step and nobody behind."""
    from safetensors import safe_open

    got, out, err = running.end()
    assert got == code, out + err
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert f"stopped after step {steps[-1]} of {ENDLESS}" in out
    assert "there is no checkpoint to resume from; --save-steps N would have written one" in out
    assert f"weights: {folder.name}/model" in out or f"weights: runs/{folder.name}/model" in out
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2, err
    assert err.count("ending after this step") <= 1, err
    with safe_open(folder / "model" / "model.safetensors", "pt") as weights:
        assert list(weights.keys())
    assert not (folder / "model.unfinished").exists()
    assert not (folder / "error.txt").exists()
    assert running.alone


@pytest.mark.parametrize("nproc", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_ctrl_c_ends_after_the_step_with_its_weights(start: Callable[..., Running], tmp_path: Path, nproc: str) -> None:
    running = start("--nproc", nproc, "--output-dir", "out", "--logging-steps", "7")
    running.read_until("step ")
    running.press_ctrl_c()
    check_stopped(running, tmp_path / "out", 130)


@pytest.mark.slow
@pytest.mark.parametrize(
    "nproc, number",
    [
        ("2", signal.SIGTERM),
        *(
            pytest.param(n, s, marks=pytest.mark.slow)
            for n, s in [("2", signal.SIGINT), ("1", signal.SIGTERM), ("1", signal.SIGINT)]
        ),
    ],
)
def test_processes_that_read_leave_it_to_their_rank(
    start: Callable[..., Running], tmp_path: Path, nproc: str, number: int
) -> None:
    """What a terminal, or Slurm, sends to all processes reaches them, too."""
    running = start("--nproc", nproc, "--output-dir", "out", "--streaming")
    running.read_until("step ")
    os.killpg(running.process.pid, number)
    check_stopped(running, tmp_path / "out", 128 + number)


@pytest.mark.slow
def test_so_do_those_of_trainers_that_trl_feeds(
    command: Callable[..., Running], tiny_models: Any, media_files: Path, tmp_path: Path
) -> None:
    row = {"query": "<image>which digit?", "solution": "7", "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    reward = f"{Path(__file__).parent / 'rlhf' / 'rewards_for_tests.py'}:chance"
    generated = f"--num-generations 2 --max-completion-length 6 --temperature 4 --reward-funcs {reward}"
    fixed = f"--model {tiny_models('qwen2_5_vl')} --dataset rows.jsonl --max-steps {ENDLESS} --workers 2"
    fixed += f" --media-root {media_files}"
    running = command("rlhf", *f"--rlhf-type grpo {fixed} {generated} --nproc 1 --output-dir out".split())
    running.read_until("step ")
    os.killpg(running.process.pid, signal.SIGTERM)
    check_stopped(running, tmp_path / "out", 128 + signal.SIGTERM)


SLOWLY = """
import shardproof, time, transformers
prepare = transformers.Trainer._prepare_inputs
def slowly(trainer, inputs):
    if not trainer.model.training:
        print("evaluates", flush=True)
        time.sleep(0.5)
    return prepare(trainer, inputs)
transformers.Trainer._prepare_inputs = slowly
shardproof.register_callback("slowly")(type("Slowly", (transformers.TrainerCallback,), {}))
"""
PAIR = {"prompt": "why?", "chosen": "so", "rejected": "no", "query": "why?", "positive": "so", "negative": "no"}
EVALUATED = [
    "sft --save-steps 100",
    "sft --keep-best --save-steps 2 --predict-with-generate --answer-metrics exact_match --max-new-tokens 2",
    "rlhf --rlhf-type dpo --save-steps 100",
    "rlhf --rlhf-type grpo --num-generations 2 --max-completion-length 2 --reward-funcs length --save-steps 100",
    "sft --task embedding --save-steps 100",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, nproc",
    [
        pytest.param(kind, nproc, marks=[] if (nproc, kind) == ("2", EVALUATED[0]) else pytest.mark.slow)
        for nproc in "12"
        for kind in EVALUATED
    ],
)
def test_an_evaluation_of_minutes_is_left(
    command: Callable[..., Running], tiny: Path, rows: Path, tmp_path: Path, kind: str, nproc: str
) -> None:
    """Slurm kills half a minute behind its signal. What was learnt since the last checkpoint is saved then."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    with (tmp_path / "many.jsonl").open("w") as many:
        for row in rows.read_text().splitlines() * 100:
            many.write((row if kind.startswith("sft") and "embedding" not in kind else json.dumps(PAIR)) + "\n")
    fixed = ["--model", str(tiny), "--max-steps", str(ENDLESS), "--output-dir", "out", "--nproc", nproc]
    data = ["--dataset", "many.jsonl#8", "--val-dataset", "many.jsonl", "--eval-steps", "2"]
    running = command(*kind.split(), *fixed, *data, "--external-plugins", "slowly.py")
    running.read_until("evaluates")
    time.sleep(1)
    running.process.terminate()
    code, out, err = running.end()
    assert code == 143, out + err
    assert (
        f"stopped after step 2 of {ENDLESS}\nits newest checkpoint is out/checkpoint-2: add --resume out to continue"
        in out
    )
    assert "Traceback" not in err
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert "eval_" not in (tmp_path / "out" / "metrics.jsonl").read_text()
    assert running.alone


SAVES_FOR_LONG = """
import shardproof, time, transformers
@shardproof.register_callback("slow_disk")
class SlowDisk(transformers.TrainerCallback):
    def on_save(self, *args, **kwargs):
        time.sleep(35)
"""


@pytest.mark.slow
def test_several_machines_save_for_as_long_as_it_takes(start: Callable[..., Running], tmp_path: Path) -> None:
    """torch's launcher kills ranks half a minute behind a signal, unless it is told otherwise."""
    (tmp_path / "slow.py").write_text(SAVES_FOR_LONG)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    where = ["--nnodes", "2", "--master-addr", "localhost", "--master-port", port, "--nproc", "1"]
    plugin = ["--external-plugins", "slow.py", "--callbacks", "slow_disk", "--save-steps", "1000"]
    first, second = [start(*where, *plugin, "--node-rank", n, "--output-dir", str(tmp_path / "out")) for n in "01"]
    first.read_until("step ")
    for running in (first, second):
        running.process.terminate()
    code, out, err = first.end()
    assert (code, second.end()[0]) == (143, 143), out + err
    assert f" of {ENDLESS}" in out
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_signal_to_the_launcher_alone_does_the_same(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start("--nproc", "2", "--stage", "1")
    running.read_until("step 1/")
    running.process.terminate()
    (folder,) = (tmp_path / "runs").iterdir()
    check_stopped(running, folder, 143)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_terminal_that_is_closed_does_the_same(tiny: Path, rows: Path, tmp_path: Path, nproc: str) -> None:
    """What is written behind it cannot be read by anybody, and is no error."""
    fixed = ["sft", "--model", str(tiny), "--dataset", str(rows), "--max-steps", str(ENDLESS), "--output-dir", "out"]
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "shardproof", *fixed, "--nproc", nproc])
    said = b""
    while b"tokens/s" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129, said.decode()
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "error.txt").exists()


@pytest.mark.slow
def test_nohup_protects_all_processes(start: Callable[..., Running], tmp_path: Path) -> None:
    """Torch's launcher would take the signal all the same, and end them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = start("--nproc", "2", "--output-dir", "out")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.read_until("step 1/")
    os.killpg(running.process.pid, signal.SIGHUP)
    log = tmp_path / "out" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while len(log.read_text().splitlines()) < 9 and time.monotonic() < limit:
        time.sleep(0.05)
    assert running.process.poll() is None
    running.press_ctrl_c()
    check_stopped(running, tmp_path / "out", 130)


@pytest.mark.parametrize("nproc", [pytest.param("1", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize("line", ["model", pytest.param("output", marks=pytest.mark.slow)])
def test_before_the_first_step_nothing_is_left(
    start: Callable[..., Running], tmp_path: Path, nproc: str, line: str
) -> None:
    running = start("--nproc", nproc)
    running.read_until(line)
    running.press_ctrl_c()
    code, out, err = running.end()
    # A shell says 130 of both: Python ends itself by the signal where that fell into an exec() of a library.
    assert code in (130, -signal.SIGINT), out + err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2, err
    assert running.alone
    if "stopped after step" not in out:  # who was that quick has a whole run
        assert "interrupted" in err
        assert not (tmp_path / "runs").exists()


SWALLOWS = """
import os, signal, sys, time
class Numpy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                open("swallowed", "w").close()
sys.meta_path.insert(0, Numpy())
from shardproof.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_library_that_swallows_it_does_not_keep_the_run_going(
    rows: Path, tiny: Path, tmp_path: Path, nproc: str
) -> None:
    """As torch does while it imports numpy."""
    options = ["sft", "--model", str(tiny), "--dataset", str(rows), "--nproc", nproc, "--max-steps", "2"]
    command = [sys.executable, "-c", SWALLOWS, *options, "--output-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "swallowed").exists()
    assert done.returncode in (130, -signal.SIGINT), done.stdout + done.stderr
    assert "interrupted" in done.stderr
    assert "step 1/" not in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ranks_do_not_outlive_who_started_them(start: Callable[..., Running]) -> None:
    running = start("--nproc", "2")
    running.read_until("step 1/")
    running.process.kill()
    running.process.wait()
    limit = time.monotonic() + 60
    while not running.alone and time.monotonic() < limit:
        time.sleep(0.05)
    assert running.alone


@pytest.mark.slow
def test_of_a_rank_that_dies_the_steps_are_told_and_no_weights_are(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start("--nproc", "2", "--output-dir", "out")
    running.read_until("step 1/")
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, out, err = running.end()
    assert code == 1, out + err
    assert "was ended by SIGKILL" in err
    assert "without saving weights" in err
    assert "nothing learned is kept: --save-steps N would have kept it every N steps; --max-restarts N" in err
    assert (tmp_path / "out" / "metrics.jsonl").exists()
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_without_noise(command: Callable[..., Running], tiny: Path, tmp_path: Path) -> None:
    talkative = shutil.copytree(tiny, tmp_path / "talkative")
    settings = json.loads((talkative / "generation_config.json").read_text())
    (talkative / "generation_config.json").write_text(json.dumps({**settings, "min_new_tokens": ENDLESS}))
    ask = ["--prompt", "every rank holds", "--max-new-tokens", str(ENDLESS), "--temperature", "100"]  # any word
    running = command("infer", str(talkative), *ask)
    assert running.process.stdout is not None
    running.process.stdout.read(3)
    running.press_ctrl_c()
    code, _, err = running.end()
    assert code == 130, err
    *told, last = err.strip().splitlines()
    assert last == "interrupted"
    assert all(line.startswith(("With --max-new-tokens", "The model in ")) for line in filter(None, told)), err


def test_one_that_falls_into_a_finalizer_is_remembered_without_a_word() -> None:
    """Python prints what a finalizer raises, with its traceback, and goes on."""
    code = (
        "import signal; from shardproof.interrupts import raise_again, remembered\n"
        "class Held:\n    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "with remembered():\n    Held()\n    try: raise_again()\n    except KeyboardInterrupt: print('raised again')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "raised again\n", "")
