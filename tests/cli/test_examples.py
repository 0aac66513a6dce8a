"""Promise: the page of every command has an example, and it runs as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from shardproof.cli import options
from shardproof.cli.main import COMMANDS
from shardproof.cli.table import parser_of

FILE = Path(__file__).parents[2] / "docs" / "site" / "examples.sh"
EXAMPLES = dict(re.findall(r"^# (\w+)\n(.+?)\n(?=\n|\Z)", FILE.read_text(), re.MULTILINE | re.DOTALL))


def words_of(name: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in EXAMPLES[name].replace("\\\n", " ").splitlines()]


def test_every_command_has_one() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_their_options_are_those_of_the_command(name: str) -> None:
    for program, command, *words in words_of(name):
        assert (program, command) == ("shardproof", name)
        mine = words[: words.index("--")] if "--" in words else words
        mine = mine[: mine.index(">")] if ">" in mine else mine
        options.parse(parser_of(name), mine[mine[:1] == ["show"] :])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_its_page_has_every_option_that_help_shows(name: str) -> None:
    pytest.importorskip("mkdocs")
    place = importlib.util.spec_from_file_location("pages", FILE.with_name("pages.py"))
    assert place is not None
    assert place.loader is not None
    pages = importlib.util.module_from_spec(place)
    place.loader.exec_module(pages)
    page = pages.command_page(name)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shown = re.findall(r"^  (?:-\w(?: \S+)?, )?(--[\w-]+)", parser_of(name).format_help(), re.MULTILINE)
    told = {word for row in rows for word in re.findall(r"`(--[\w-]+)`", row[0])}
    assert told | {"--help"} == {*shown, "--help"}
    assert all(row[-1].strip() for row in rows)
    assert EXAMPLES[name] in page


def watched(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """It serves until it is stopped."""
    run = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        port = int(command[command.index("--port") + 1])
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
        assert b"<html" in page
    finally:
        run.send_signal(signal.SIGINT)
        assert run.wait(20) in (0, 130)


def foreign(folder: Path) -> None:
    """What torch.distributed.checkpoint wrote for FSDP2, which the example of `convert` brings over."""
    made = (
        "import torch, torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
        "model = torch.nn.Linear(4, 4); optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step()\n"
        "state, its = get_state_dict(model, optimizer)\n"
        "dcp.save({'model': state, 'optimizer': its}, checkpoint_id='fsdp/step-500')"
    )
    subprocess.run([sys.executable, "-c", made], cwd=folder, check=True, timeout=100)


@pytest.mark.slow
def test_they_run_from_top_to_bottom(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "shardproof"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardproof "$@"\n')
    program.chmod(0o755)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    foreign(tmp_path)
    for name, text in EXAMPLES.items():
        if name == "watch":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            watched([str(program), *words_of(name)[0][1:-1], port], tmp_path, environment)
            continue
        command = ["bash", "-eu", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    for made in ("compare.html", "exported/model.safetensors", "job.sh", "runs/moved/step-500", "shardproof.bash"):
        assert (tmp_path / made).exists()
