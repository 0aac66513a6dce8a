"""What is saved beside the model: plain values and objects with a state, read back without running foreign code."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from checkpoint.runs import Job, Mixed
from shardproof.checkpoint.values import random_state, set_random_state

Run = Callable[..., list[Any]]


def values_of_ranks(path: str) -> Any:
    job = Job(3, Mixed)
    rank = dist.get_rank()
    saving = shardproof.save(job.model, None, path, common={"a": [1, (2.5, None)], "t": torch.ones(2)}, own=rank * 10)
    saving.wait()
    return shardproof.load(job.model, None, path)


def test_ranks_get_their_own_values(run2: Run, tmp_path: Path) -> None:
    """What differs on the ranks is kept for each."""
    for rank, values in enumerate(run2(values_of_ranks, str(tmp_path / "saved"))):
        assert values["own"] == rank * 10
        assert values["common"]["a"] == [1, (2.5, None)]
        assert torch.equal(values["common"]["t"], torch.ones(2))


def test_fewer_ranks_take_the_first_values(run2: Run, tmp_path: Path) -> None:
    run2(values_of_ranks, str(tmp_path / "saved"))
    assert shardproof.load(Job(0, Mixed).model, None, tmp_path / "saved")["own"] == 0


def drawn_after_a_save(path: str, alike: bool) -> float:
    import numpy as np

    job, rank = Job(3, Mixed), dist.get_rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0 if alike else rank)
    shardproof.save(job.model, None, path, own=rank).wait()
    return float(torch.rand(()))


def drawn_after_a_load(path: str) -> tuple[float, list[str]]:
    job, said = Job(3, Mixed), []
    log, handler = logging.getLogger("shardproof"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        shardproof.load(job.model, None, path)
    finally:
        log.removeHandler(handler)
    return float(torch.rand(())), said


@pytest.mark.parametrize("alike", [False, True])
def test_more_ranks_go_on_where_those_were_that_saved(run2: Run, run4: Run, tmp_path: Path, alike: bool) -> None:
    """Those that were not there draw numbers of their own if the others do, and say which value they take."""
    first, second = run2(drawn_after_a_save, str(tmp_path / "saved"), alike)
    drawn, said = zip(*run4(drawn_after_a_load, str(tmp_path / "saved")), strict=True)
    assert drawn[:2] == (first, second)
    assert len({*drawn}) == (1 if alike else 4)
    assert [len(messages) for messages in said] == [0, 0, 1, 1]
    assert said[2][0].startswith(
        "'own' differed between the 2 ranks that saved it; rank 2, which has none, takes rank 0's"
    )


def value_of_one_rank(path: str, which: int) -> Any:
    job = Job(3, Mixed)
    own = {"seen": 7} if dist.get_rank() == which else {}
    shardproof.save(job.model, None, path, **own).wait()
    return shardproof.load(job.model, None, path)


def test_a_value_that_one_rank_passes(run2: Run, tmp_path: Path) -> None:
    """It is there again on that rank; what rank 0 has is for those who have none."""
    assert run2(value_of_one_rank, str(tmp_path / "second"), 1) == [{}, {"seen": 7}]
    assert run2(value_of_one_rank, str(tmp_path / "first"), 0) == [{"seen": 7}, {"seen": 7}]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def save_something_odd(path: str) -> str:
    job = Job(3, Mixed)
    odd = Evil() if dist.get_rank() == 1 else 1
    with pytest.raises(shardproof.CheckpointError) as refused:
        shardproof.save(job.model, None, path, odd={"inside": odd})
    job.train(1)  # nothing is left of it
    return str(refused.value)


def test_what_cannot_be_read_back_safely_is_refused_when_it_is_saved(run2: Run, tmp_path: Path) -> None:
    """By name, on all ranks, also if only one of them has it."""
    for text in run2(save_something_odd, str(tmp_path / "saved")):
        assert "'odd' (dict) cannot be saved: a checkpoint holds numbers, strings" in text
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """The best loss is often the mean that NumPy takes."""
    numpy = pytest.importorskip("numpy")
    job = Job(0, Mixed)
    best = {"loss": numpy.mean([1.0, 2.0]), "steps": [numpy.int64(3)], "better": (numpy.bool_(True), {numpy.int64(4)})}
    shardproof.save(job.model, None, tmp_path / "saved", best=best).wait()
    found = shardproof.load(job.model, None, tmp_path / "saved")
    assert found == {"best": {"loss": 1.5, "steps": [3], "better": (True, {4})}}
    assert type(found["best"]["loss"]) is float


def test_an_array_of_numpy_is_refused_with_what_to_do(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(shardproof.CheckpointError, match=r"'state' \(ndarray\) cannot be saved.*as_tensor") as refused:
        shardproof.save(Job(0, Mixed).model, None, tmp_path / "saved", state=numpy.zeros(3))
    assert "\x1b" not in str(refused.value)
    assert "Weights only load" not in str(refused.value)


def test_a_pickle_in_a_checkpoint_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the values nor the metadata of a foreign checkpoint run code."""
    import pickle

    job = Job(0, Mixed)
    job.save(tmp_path / "saved", asynchronous=False)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Evil()))
    job.load(tmp_path / "saved")
    assert "code ran" not in capsys.readouterr().out


def test_state_of_objects_that_are_not_passed_is_returned(tmp_path: Path) -> None:
    job = Job(0, Mixed)
    job.train(2)
    job.save(tmp_path / "saved").wait()
    assert shardproof.load(job.model, None, tmp_path / "saved")["scheduler"]["last_epoch"] == 2


def test_what_cannot_take_a_state_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """A plain value, which load returns, and an object whose state was not saved."""
    job = Job(0, Mixed)
    job.save(tmp_path / "saved").wait()
    job.train(1)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    with pytest.raises(shardproof.CheckpointError, match=r"'step' \(int\) has no load_state_dict.* Leave it"):
        shardproof.load(job.model, job.optimizer, tmp_path / "saved", step=0)
    with pytest.raises(
        shardproof.CheckpointError, match="no state for 'schedule': scheduler, step was saved along with"
    ):
        shardproof.load(job.model, job.optimizer, tmp_path / "saved", schedule=job.scheduler)
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())


def test_a_rank_that_was_not_there_draws_numbers_of_its_own() -> None:
    """Of each generator, and the same whenever it goes on from there."""
    import numpy as np

    state = random_state()

    def drawn(stranger: int | None) -> tuple[float, ...]:
        set_random_state(state, stranger)
        return float(torch.rand(())), random.random(), float(np.random.random())  # noqa: NPY002 - the one that is saved

    own, first, second = drawn(None), drawn(2), drawn(3)
    assert all(len({*three}) == 3 for three in zip(own, first, second, strict=True))
    assert (drawn(2), drawn(None)) == (first, own)
