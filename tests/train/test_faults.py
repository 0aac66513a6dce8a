"""Whatever ends a run, the same command with --resume auto goes on, and every step is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.train.conftest import last_of_each

pytestmark = pytest.mark.slow
KILLER = Path(__file__).with_name("killer.py")
STEPS = 60


@pytest.fixture(scope="module")
def whole(commands, sft):
    """A run that nobody disturbs."""
    found = commands([("whole", sft("--nproc", "2", "--max-steps", str(STEPS)))])["whole"]
    assert found.code == 0, found.output
    return found


def check_same(whole, folder: Path, steps: int = STEPS) -> None:
    """Every step is in the log once, with its loss."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert losses == whole.series("loss")[:steps]
    assert (folder / "model" / "model.safetensors").is_file()


def test_killed_twenty_times(whole, sft: Callable[..., list[str]], tmp_path: Path) -> None:
    """All processes or one rank, at random moments, half of them in the middle of a save: nothing complete is lost."""
    folder = tmp_path / "out"
    folder.mkdir()
    more = ["--nproc", "2", "--max-steps", str(STEPS), "--save-steps", "1", "--save-total-limit", "3"]
    argv = [str(folder) if arg == "OUT" else arg for arg in sft(*more, "--resume", "auto")]
    (tmp_path / "argv.json").write_text(json.dumps(last_of_each(argv)))
    command = [sys.executable, str(KILLER), str(folder), str(tmp_path / "argv.json"), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, found["log"]
    assert len(found["steps"]) == 20
    for before, after in found["steps"]:
        assert after >= before
    assert "Traceback" not in found["log"]
    check_same(whole, folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`disk(options)` mounts a small file system, or changes how it is mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        again = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options]
        done = subprocess.run(["mount", *again, "none", str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting needs privileges: {done.stderr}")
        mounted.append(place)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_full_disk_and_a_read_only_one(
    whole, commands, sft: Callable[..., list[str]], disk: Callable[..., Path], tmp_path: Path
) -> None:
    """The run is told of what could not be saved and trains on; with room again the same command goes on."""
    model = size_of(whole.folder / "model")
    place = disk(f"size={int(4.6 * model)}")
    folder = place / "out"
    argv = [
        str(folder) if arg == "OUT" else arg for arg in sft("--nproc", "2", "--save-steps", "2", "--max-steps", "8")
    ]
    full = commands([("full", argv)])["full"]
    assert full.output.count("No space left on device") >= 2
    assert "checkpoint-2" in os.listdir(folder)
    assert not list(folder.glob("*.unfinished"))
    disk("ro")
    for other in (folder, place / "new"):
        refused = commands([("ro", [*(str(other) if arg == str(folder) else arg for arg in argv), "--resume", "auto"])])
        assert refused["ro"].code == 2, refused["ro"].output
        assert "cannot be used: Read-only file system" in refused["ro"].output
        assert "Traceback" not in refused["ro"].output
    disk(f"rw,size={40 * model}")
    again = commands([("again", [*argv, "--resume", "auto"])])["again"]
    assert again.code == 0, again.output
    assert "checkpoint-2" in again.output
    check_same(whole, folder, 8)


def test_weights_for_which_there_is_no_room_name_their_folder(
    commands, sft: Callable[..., list[str]], disk: Callable[..., Path]
) -> None:
    place = disk("size=200k")
    whole, adapters = sft("--nproc", "2", "--max-steps", "1"), sft("--max-steps", "1", "--tuner", "lora")
    runs = [
        (name, [str(place / name) if arg == "OUT" else arg for arg in argv])
        for name, argv in (("whole", whole), ("adapters", [*adapters, "--lora-rank", "64"]))
    ]
    for name, run in commands(runs).items():
        assert run.code == 2, run.output
        lines = [line for line in run.output.splitlines() if "No space left on device" in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"error: The weights cannot be written to {place / name}/model.unfinished: ")


def test_a_full_checkpoint_for_adapters(whole, commands, sft: Callable[..., list[str]], rows: Path) -> None:
    """Refused before a model is loaded, with the way from the one to the other, and no checkpoint is touched.
    tests/checkpoint/test_faults.py sees that names that differ are said where a model is there."""
    runs = commands([("first", sft("--save-steps", "3", "--max-steps", "3"))])
    folder = runs["first"].folder
    adapters = sft("--tuner", "lora", "--max-steps", "4", "--resume", str(folder / "checkpoint-3"))
    argv = [arg.replace("OUT", str(folder.with_name("other"))) for arg in adapters]
    other = commands([("other", argv)])["other"]
    assert other.code == 2, other.output
    assert "--tuner lora instead of full" in other.output
    assert f"shardproof export {folder / 'checkpoint-3'} FOLDER, then --model FOLDER." in other.output
    assert (folder / "checkpoint-3" / "checkpoint.json").is_file()
