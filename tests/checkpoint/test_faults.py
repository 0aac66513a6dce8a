"""Whatever happens in the middle of a save, a complete checkpoint is never lost; what is damaged is refused by name."""

from __future__ import annotations

import atexit
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardproof
from checkpoint.runs import Job, Mixed, lora
from distributed.harness import listening
from shardproof.checkpoint.contents import compare, plain_parts
from shardproof.checkpoint.folder import Aside, Lock, complete, newest, remove_old
from shardproof.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Tensor
from shardproof.checkpoint.saving import Channel, Saving
from shardproof.errors import CheckpointError

Run = Callable[..., list[Any]]
SAVER = Path(__file__).with_name("saver.py")


@contextmanager
def saving(folder: Path, *more: str, ranks: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Jobs of saver.py, as torchrun would start them; none outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in range(ranks):
        env = {**os.environ}
        if ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        command = [sys.executable, str(SAVER), str(folder), *more]
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.wait()
            if job.stdout is not None:
                job.stdout.close()


def load_newest(folder: Path) -> int:
    """The step of the newest checkpoint, every byte of which is read."""
    model = shardproof.shard(nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))), stage=0)
    optimizer = torch.optim.AdamW(model.parameters())
    path = newest(folder)
    assert path is not None
    step = shardproof.load(model, optimizer, path)["step"]
    assert path.name == f"step-{step}"
    return int(step)


def kill_in_a_save(folder: Path, chance: random.Random, ranks: int, victims: int) -> int:
    """End jobs in the middle of a save; returns the last step whose save had returned by then."""
    with saving(folder, ranks=ranks) as jobs:
        out = jobs[0].stdout
        assert out is not None
        step = 0
        for _ in range(chance.randint(1, 4)):
            line = out.readline()
            assert line.strip().isdigit(), line + out.read()
            step = int(line)
        deadline = time.monotonic() + 20
        while not list(folder.glob("*.unfinished")) and time.monotonic() < deadline:
            pass
        time.sleep(chance.random() * 0.02)
        for job in chance.sample(jobs, victims):
            job.send_signal(signal.SIGKILL)
        if victims < ranks:  # who is left ends by itself
            for job in jobs:
                job.wait(timeout=60)
        return step


def test_sigkill_in_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """What had been saved is there and whole, and the next job saves over what the killed one left."""
    chance = random.Random(1)
    for _ in range(2):
        step = kill_in_a_save(tmp_path, chance, ranks=1, victims=1)
        assert load_newest(tmp_path) >= step


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2])
def test_sigkill_of_ranks_twenty_times(tmp_path: Path, victims: int) -> None:
    """One rank of two, or both."""
    chance = random.Random(victims)
    for number in range(10):
        folder = tmp_path / str(number)
        step = kill_in_a_save(folder, chance, 2, victims)
        assert load_newest(folder) >= step


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    """The error names the file and the reason, and what could not be finished makes room again."""
    with saving(tmp_path, "100000") as (job,):
        text, _ = job.communicate(timeout=120)
    assert "step-2 could not be written and does not exist" in text
    assert "File too large" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert load_newest(tmp_path) == 1


@pytest.mark.slow
def test_a_full_file_system(tmp_path: Path) -> None:
    """A real one, of 8 MB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs privileges")
    try:
        with saving(tmp_path) as (job,):
            text, _ = job.communicate(timeout=120)
        assert "No space left on device" in text
        assert complete(tmp_path)
        assert not list(tmp_path.glob("*.unfinished"))
        load_newest(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Job, Path]:
    """A job with two checkpoints, `old` and `new`."""
    job = Job(0, Mixed)
    for name in ("old", "new"):
        job.train(1)
        job.save(tmp_path / name).wait()
    return job, tmp_path


def test_a_truncated_file_is_refused_and_passed_over(two: tuple[Job, Path]) -> None:
    job, folder = two
    file = folder / "new" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(shardproof.CheckpointError, match=r"__0_0.distcp has .* bytes instead of .* is .*/old\."):
        job.load(folder / "new")
    assert newest(folder) == folder / "old"


def test_a_missing_file_is_refused(two: tuple[Job, Path]) -> None:
    job, folder = two
    (folder / "new" / "__0_0.distcp").unlink()
    with pytest.raises(shardproof.CheckpointError, match="distcp is missing"):
        job.load(folder / "new")


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_refused(two: tuple[Job, Path], place: float) -> None:
    """In a value or in a tensor: the file is named, and the checkpoint before it offered."""
    job, folder = two
    file = folder / "new" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 4
    file.write_bytes(data)
    with pytest.raises(shardproof.CheckpointError, match=r"__0_0.distcp is damaged: the checksum of .* is .*/old\."):
        job.load(folder / "new")


def test_a_damaged_manifest_is_refused_and_passed_over(two: tuple[Job, Path]) -> None:
    job, folder = two
    file = folder / "new" / "checkpoint.json"
    file.write_text(file.read_text().replace('"stage":0', '"stage":1'))
    with pytest.raises(shardproof.CheckpointError, match="json is damaged"):
        job.load(folder / "new")
    assert newest(folder) == folder / "old"


def test_without_its_mark_a_folder_is_no_checkpoint(two: tuple[Job, Path]) -> None:
    job, folder = two
    (folder / "new" / "checkpoint.json").unlink()
    with pytest.raises(
        shardproof.CheckpointError, match=r"not a complete checkpoint.*newest complete one there is .*/old"
    ):
        job.load(folder / "new")
    with pytest.raises(shardproof.CheckpointError, match="there is no such folder"):
        job.load(folder / "nothing")
    with pytest.raises(shardproof.CheckpointError, match=r"newest complete one there is .*/old"):
        job.load(folder)
    shutil.copytree(folder / "old", folder / "later.unfinished")  # a program that ended before it was renamed
    assert complete(folder) == [folder / "old"]
    (folder / "file").touch()
    for name in ("new", "file"):
        with pytest.raises(shardproof.CheckpointError, match="exists already and is not a checkpoint"):
            job.save(folder / name)


def test_a_checkpoint_of_the_same_name_is_replaced(two: tuple[Job, Path]) -> None:
    """At no time is there none: until the new one has its place, the old one stands beside it."""
    job, folder = two
    job.train(1)
    job.save(folder / "new").wait()
    job.load(folder / "new")
    assert job.step == 3
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old"]
    (folder / "new").rename(folder / "new.previous")  # where the program was ended between two renames
    job.load(folder / "new")
    assert job.step == 3
    shutil.copytree(folder / "old", folder / "new")  # or before the last one was removed
    job.load(folder / "new")
    assert job.step == 1
    job.save(folder / "new").wait()
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old"]


def test_one_of_a_later_version_is_refused(two: tuple[Job, Path]) -> None:
    job, folder = two
    manifest = Manifest.read(folder / "new")
    manifest.format = FORMAT + 1
    manifest.write(folder / "new")
    with pytest.raises(shardproof.CheckpointError, match=r"written by a later version of shardproof.*/old\."):
        job.load(folder / "new")


def of_another_model(path: str) -> list[str]:
    job = Job(3, Mixed)
    job.save(path, asynchronous=False)
    texts = []
    for other in (Job(3, lora), Job(3, lambda: nn.Sequential(Mixed(), nn.Linear(2, 2)))):
        with pytest.raises(shardproof.CheckpointError) as refused:
            shardproof.load(other.model, None, path)
        texts.append(str(refused.value))
    wider = Mixed()
    wider.head = nn.Linear(5, 4)
    with pytest.raises(shardproof.CheckpointError) as refused:
        shardproof.load(shardproof.shard(wider, 3), None, path)
    return [*texts, str(refused.value)]


def test_a_clock_that_was_set_back_does_not_make_old_ones_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are started again may have the clock of another machine."""
    job = Job(0, Mixed)
    job.save(tmp_path / "step-1").wait()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for step in (3, 2):  # the later one has the smaller number
        job.save(tmp_path / f"step-{step}", keep=2).wait()
    assert [path.name for path in complete(tmp_path)] == ["step-3", "step-2"]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_so_many_are_kept(tmp_path: Path, keep: int) -> None:
    job = Job(0, Mixed)
    job.save(tmp_path / "best", asynchronous=False)  # has another name
    for step in range(1, 8):
        job.save(tmp_path / f"step-{step}", asynchronous=False, keep=keep)
        newest = [f"step-{n}" for n in range(max(1, step - keep + 1), step + 1)]
        assert [path.name for path in complete(tmp_path)] == ["best", *newest]


@pytest.mark.parametrize("keep", [1, 2, 3, 6])
def test_one_that_is_spared_is_kept_beside_the_newest(tmp_path: Path, keep: int) -> None:
    job = Job(0, Mixed)
    for step in range(1, 6):
        job.save(tmp_path / f"step-{step}", asynchronous=False)
    remove_old(tmp_path / "step-5", keep, tmp_path / "step-1")
    newest = range(max(1, 6 - max(keep - 1, 1)), 6) if keep < 5 else range(1, 6)
    assert [path.name for path in complete(tmp_path)] == sorted({"step-1", *(f"step-{n}" for n in newest)})


@pytest.mark.parametrize("spare", ["step-9", "step-3"])
def test_one_that_is_spared_and_is_not_there_or_is_kept_anyway_takes_no_place(tmp_path: Path, spare: str) -> None:
    job = Job(0, Mixed)
    for step in range(1, 4):
        job.save(tmp_path / f"step-{step}", asynchronous=False)
    remove_old(tmp_path / "step-3", 2, tmp_path / spare)
    assert [path.name for path in complete(tmp_path)] == ["step-2", "step-3"]


def test_a_save_spares_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(0, Mixed)
    monkeypatch.chdir(tmp_path)
    for step in range(1, 5):
        job.save(tmp_path / f"step-{step}", asynchronous=False, keep=2, spare="step-1")
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-4"]


def test_an_old_one_that_cannot_be_removed_is_told_and_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that somebody protected, or another user's."""
    job, unlink = Job(0, Mixed), Path.unlink

    def protected(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "step-1":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    job.save(tmp_path / "step-1", asynchronous=False)
    monkeypatch.setattr(Path, "unlink", protected)
    with listening() as lines:
        for step in (2, 3):
            job.save(tmp_path / f"step-{step}", asynchronous=False, keep=1)
    assert lines == [f"The old checkpoint {tmp_path / 'step-1'} cannot be removed: Permission denied"] * 2
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-3"]


def test_to_keep_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(shardproof.CheckpointError, match="keep=0 must be a number of checkpoints"):
        Job(0, Mixed).save(tmp_path / "saved", keep=0)


def test_a_checkpoint_of_another_model_is_refused(run2: Run, tmp_path: Path) -> None:
    """With how many names differ, and the first five of each kind."""
    for with_lora, nested, wider in run2(of_another_model, str(tmp_path / "saved")):
        assert "is a checkpoint of another model. 38 missing in it: base_model.model.embed.weight, " in with_lora
        assert "30 not in this model: scale, empty, unused, embed.weight, embed.bias ..." in with_lora
        assert "missing in it: 0.scale, 0.empty, 0.unused, 0.embed.weight, 0.embed.bias ..." in nested
        assert "2 of another shape: " in wider
        assert "head.weight [3, 5] instead of [4, 5]" in wider


@pytest.mark.parametrize(
    ("frozen", "saved", "said"),
    [
        (True, [8, 4], r"1 of another shape: weight \[8, 4\] instead of \[2, 4\]"),
        (False, [4, 1], r"1 of another shape: weight \[4, 1\] instead of \[2, 4\]"),  # as of four bits, and it is not
    ],
)
def test_a_shape_is_compared_of_what_is_there(frozen: bool, saved: list[int], said: str) -> None:
    """Also where another engine did not say which frozen parameters it left out."""
    here = plain_parts(nn.Linear(4, 2, bias=False).requires_grad_(not frozen))
    manifest = Manifest(0.0, 0, 1, {"model.weight": Tensor(saved, "float32")}, frozen_unknown=frozen)
    with pytest.raises(CheckpointError, match=said):
        compare(here, manifest, "there")
    compare(here, Manifest(0.0, 0, 1, {"model.weight": Tensor([2, 4], "float32")}), "there")


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    job = Job(0, Mixed)
    job.save(tmp_path / "saved", asynchronous=False)
    params = list(job.model.parameters())
    with pytest.raises(shardproof.CheckpointError, match="has 2 parameter groups; this one has 1"):
        shardproof.load(job.model, torch.optim.AdamW(params), tmp_path / "saved")
    other = torch.optim.AdamW([{"params": params[:5]}, {"params": params[5:]}])
    with pytest.raises(shardproof.CheckpointError, match=r"Group 0 of the optimizer holds other parameters.* differ: "):
        shardproof.load(job.model, other, tmp_path / "saved")
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(
        shardproof.CheckpointError, match="Group 0 of AdamW holds 1 parameters that do not belong to this"
    ):
        shardproof.save(job.model, stranger, tmp_path / "other")


def test_two_jobs_on_one_folder_are_refused(tmp_path: Path) -> None:
    """The second one is told who is there, and the first one goes on."""
    (tmp_path / "saved.unfinished").mkdir()
    (tmp_path / "saved.unfinished" / "lock").write_text("process 1 on a host that is gone")
    (tmp_path / "saved").mkdir()  # an empty folder may be there
    first = Aside(tmp_path / "saved")
    job = Job(0, Mixed)
    with pytest.raises(shardproof.CheckpointError, match=rf"Another job is saving to .* \(process {os.getpid()} on"):
        job.save(tmp_path / "saved")
    first.discard()
    job.save(tmp_path / "saved").wait()
    job.load(tmp_path / "saved")


def test_what_a_killed_job_left_is_no_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "saved.unfinished" / "folder").mkdir(parents=True)
    (tmp_path / "saved.unfinished" / "folder" / "file").touch()
    (tmp_path / "saved.unfinished" / "__7_0.distcp").touch()
    Job(0, Mixed).save(tmp_path / "saved", asynchronous=False)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [".metadata", "__0_0.distcp", MANIFEST]


def test_a_lock_is_not_held_on_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who held it until now may have removed it between the opening and the locking of another job."""
    path, lock = tmp_path / "lock", fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(file, how)

    path.write_text("process 1 on a host that is gone")
    monkeypatch.setattr(fcntl, "flock", late)
    held = Lock(path, "first")
    with pytest.raises(CheckpointError, match=rf"^second \(process {os.getpid()} on .*\)$"):
        Lock(path, "second")
    held.release()
    Lock(path, "third").release()


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save waits for the one that is under way: both would use one channel."""
    told: list[str] = []
    awaited, write, join = threading.Event(), dcp.save, Saving.join

    def late(*args: Any, **options: Any) -> None:
        told.append("begins")
        awaited.wait(60)
        write(*args, **options)
        told.append("ends")

    def waits(saving: Saving) -> str:
        awaited.set()
        return join(saving)

    monkeypatch.setattr(dcp, "save", late)
    monkeypatch.setattr(Saving, "join", waits)
    job = Job(0, Mixed)
    first = job.save(tmp_path / "first")
    assert not first.done
    for saving in (job.save(tmp_path / "second"), first):
        saving.wait()
        assert saving.done
    assert told == ["begins", "ends", "begins", "ends"]


def test_a_failure_that_nobody_has_asked_about_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next save begins, or when the program ends."""

    def fails() -> None:
        raise OSError("the disk is gone")

    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    channel = Channel(Job(0, Mixed).model.get_parameter("head.weight").flat.engine.comm)
    for begins_or_ends in (channel.finish, at_exit[0]):
        with listening() as lines:
            channel.saving = Saving(tmp_path / "saved", fails, True)
            begins_or_ends()
            begins_or_ends()
        assert lines == [
            f"The checkpoint {tmp_path / 'saved'} could not be written and does not exist: the disk is gone"
        ]


def test_inside_a_forward_pass_nothing_is_saved(tmp_path: Path) -> None:
    job = Job(0, Mixed)
    job.model.head.register_forward_hook(lambda *_: job.save(tmp_path / "saved") and None)
    with pytest.raises(shardproof.CheckpointError, match="inside a forward pass"):
        job.train(1)


def test_inside_of_whole_nothing_is_saved(tmp_path: Path) -> None:
    job = Job(0, Mixed)
    with shardproof.whole(job.model), pytest.raises(shardproof.CheckpointError, match=r"inside .* or shardproof.whole"):
        job.save(tmp_path / "saved")


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(shardproof.EngineError, match="is not sharded"):
        shardproof.save(nn.Linear(2, 2), None, tmp_path / "saved")


def test_small_files_have_checksums_too(tmp_path: Path) -> None:
    """Damage to what another program keeps beside the tensors is found, and the checkpoint before it is the newest."""
    model = shardproof.shard(nn.Linear(4, 4), stage=0)
    for step in (1, 2):
        files = {"state.json": b'{"step": 2}', "empty": b""}
        shardproof.save(model, None, tmp_path / f"step-{step}", files=files, asynchronous=False)
    assert newest(tmp_path) == tmp_path / "step-2"
    file = tmp_path / "step-2" / "state.json"
    file.write_bytes(b'{"step": 3}')
    assert complete(tmp_path) == [tmp_path / "step-1"]
    with pytest.raises(CheckpointError, match=r"step-2/state.json is damaged: its checksum is wrong"):
        shardproof.load(model, None, tmp_path / "step-2")


def files_that_cannot_be_written(path: str) -> str:
    """What is raised; then another save, and what it holds."""
    model = shardproof.shard(nn.Linear(4, 4), stage=3)
    saving = shardproof.save(model, None, f"{path}/step-1", files={"no folder/state.json": b"{}"}, step=1)
    with pytest.raises(CheckpointError) as raised:
        saving.wait()
    shardproof.save(model, None, f"{path}/step-2", step=2).wait()
    assert shardproof.load(model, None, f"{path}/step-2") == {"step": 2}
    return str(raised.value)


def test_small_files_that_cannot_be_written_end_the_save_on_all_ranks(run2: Run, tmp_path: Path) -> None:
    """A full disk shows itself in the first file of rank 0, while the others are about to write theirs."""
    told, told_too = run2(files_that_cannot_be_written, str(tmp_path))
    assert told == told_too
    assert "step-1 could not be written and does not exist: rank 0: " in told
    assert told.endswith("/step-1.unfinished/no folder/state.json: No such file or directory.")
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


class WithScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rest = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.rest(x) * self.scale).square().mean()


def goes_on_with_a_scale(kind: str, stage: int, path: str) -> None:
    losses: list[list[float]] = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = shardproof.shard(WithScale(), stage)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        seen = []
        for step in range(4):
            if loads and step == 2:
                torch.manual_seed(1)
                model = shardproof.shard(WithScale(), stage)
                optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
                shardproof.load(model, optimizer, path)
            loss = model(torch.ones(2, 3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            if not loads and step == 1:
                shardproof.save(model, optimizer, path)
        losses.append(seen)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adagrad", "AdamW"])
def test_a_parameter_of_one_number(run2: Run, tmp_path: Path, kind: str, stage: int) -> None:
    run2(goes_on_with_a_scale, kind, stage, str(tmp_path / "there"))


@pytest.mark.parametrize("value", [3, 0.5, "last"])
def test_a_number_or_text_is_no_state_of_an_object(tmp_path: Path, value: Any) -> None:
    model = shardproof.shard(nn.Linear(4, 4), stage=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardproof.save(model, None, tmp_path / "there", step=value, asynchronous=False)
    before = model.weight.detach() + 0
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CheckpointError, match=rf"'step' is {value!r} in .*not the state of an object"):
        shardproof.load(model, None, tmp_path / "there", step=torch.optim.lr_scheduler.ConstantLR(optimizer))
    torch.testing.assert_close(model.weight.detach() - before, torch.ones(4, 4))  # nothing was taken over
