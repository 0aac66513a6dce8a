"""Promise: of several datasets each has its share of the rows, the same ones on any number of processes, and a stream
of them goes on from any place."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from shardproof.data.mixed_stream import read_stream
from shardproof.data.rows import read_rows
from shardproof.data.sources.mixture import Mixture
from shardproof.data.stream import EncodedStream, Place, Position, dealt
from shardproof.errors import DataError

SHARES = (0.75, 0.25)
ALL = Mixture(SHARES, "all_exhausted")


def rows(count: int, first: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(first, first + count)]


@pytest.fixture
def files(write: Callable[..., str]) -> list[str]:
    """Forty rows and ten."""
    return [write("long.jsonl", rows(40, 0)), write("short.jsonl", rows(10, 100))]


def numbers(read: Any) -> list[int]:
    return [int(row.messages[0]["content"].split()[0]) for row in read]


def test_rows_are_drawn_until_one_dataset_has_no_more(files: list[str]) -> None:
    """Of 0.75 and 0.25, the short one ends before the long one, after some forty rows."""
    found = numbers(read_rows(files, mixture=Mixture(SHARES), seed=1))
    assert len(set(found)) == len(found)
    short = [n for n in found if n >= 100]
    assert sorted(short) == list(range(100, 110))
    assert short != sorted(short)
    assert found[-1] >= 100
    assert 10 < len(found) - 10 <= 40
    assert max(n for n in found if n < 100) > len(found) - 10  # not its first ones only
    assert numbers(read_rows(files, mixture=Mixture(SHARES), seed=1)) == found
    assert numbers(read_rows(files, mixture=Mixture(SHARES), seed=2)) != found


def test_or_until_each_has_been_through(files: list[str]) -> None:
    found = Counter(numbers(read_rows(files, mixture=Mixture((0.5, 0.5), "all_exhausted"), seed=1)))
    assert set(found) == {*range(40), *range(100, 110)}
    assert all(found[n] == 1 for n in range(40))
    assert sum(found[n] for n in range(100, 110)) > 20


def test_what_is_taken_of_a_file_is_taken_before(files: list[str]) -> None:
    found = numbers(read_rows([f"{files[0]}#5", files[1]], mixture=ALL, seed=1))
    assert len({n for n in found if n < 100}) == 5
    assert {n for n in found if n >= 100} == set(range(100, 110))


def test_held_out_rows_are_not_learnt(files: list[str]) -> None:
    """Also where rows come several times."""
    trained, held_out = read_rows(files, mixture=Mixture((0.5, 0.5), "all_exhausted"), seed=1).split(0.2, seed=1)
    assert not set(numbers(trained)) & set(numbers(held_out))
    assert len(set(numbers(held_out))) == len(held_out) == 10


def test_a_dataset_of_which_nothing_can_be_used_is_told(files: list[str], write: Callable[..., str]) -> None:
    bad = write("bad.jsonl", [{"prompt": "a"}])
    with pytest.raises(
        DataError, match=r"bad.jsonl: none of its rows can be used, but --interleave-prob gives it a share"
    ):
        read_rows([files[0], bad], mixture=Mixture(SHARES), bad_rows="skip")


def stream(files: list[str], tokenizer: Any, mixture: Mixture, size: int = 7) -> EncodedStream:
    return EncodedStream(read_stream(files, size=size, mixture=mixture, seed=3), tokenizer, 64, seed=3)


def step(encoded: EncodedStream, readers: int, count: int) -> list[list[Any]]:
    parts = [dealt(encoded, Position(), 8 // readers, reader, readers) for reader in range(readers)]
    together = islice(zip(*parts, strict=True), count)
    return [[tuple(row["input_ids"]) for rows, *_ in ranks for row in rows] for ranks in together]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [Mixture(SHARES), ALL])
def test_a_stream_gives_any_number_of_processes_the_same(files: list[str], tokenizer: Any, mixture: Mixture) -> None:
    alone = step(stream(files, tokenizer, mixture), 1, 30)
    assert step(pickle.loads(pickle.dumps(stream(files, tokenizer, mixture))), 2, 30) == alone
    assert step(stream(files, tokenizer, mixture), 8, 30) == alone


@pytest.mark.parametrize("mixture", [Mixture(SHARES), ALL])
def test_a_stream_goes_on_where_it_was(files: list[str], tokenizer: Any, mixture: Mixture) -> None:
    whole = list(islice(dealt(stream(files, tokenizer, mixture), Position(), 2, 0, 2), 70))
    for at in (0, 3, 7, 30, 48):  # in the first pass and in later ones
        _, position, _ = whole[at]
        place, taken = json.loads(json.dumps(position))
        again = dealt(stream(files, tokenizer, mixture), Position(Place(*place), taken), 2, 0, 2)
        assert [rows for rows, *_ in islice(again, 10)] == [rows for rows, *_ in whole[at + 1 : at + 11]]


def passes(files: list[str], mixture: Mixture, count: int) -> list[list[int]]:
    read, place, found = read_stream(files, size=7, mixture=mixture, seed=3), Place(), []
    for number in range(count):
        found.append([])
        while place.passes == number:
            block = read.read(place)
            found[-1] += numbers(block.rows)
            place = block.after
    return found


def test_a_pass_of_a_stream_ends_with_the_first_dataset_or_the_last(files: list[str]) -> None:
    first, second = passes(files, Mixture(SHARES), 2)
    assert [n for n in first if n >= 100] == [n for n in second if n >= 100] == list(range(100, 110))
    assert [n for n in first if n < 100] == list(range(len(first) - 10))
    assert first != second  # drawn anew
    for one in passes(files, ALL, 3):
        counted = Counter(one)
        assert set(counted) == {*range(40), *range(100, 110)}
    drawn = [n >= 100 for one in passes(files, ALL, 40) for n in one]
    assert sum(drawn) / len(drawn) == pytest.approx(0.25, abs=0.03)


def test_a_stream_takes_the_first_so_many_rows_of_a_file(files: list[str]) -> None:
    (one,) = passes([f"{files[0]}#6", files[1]], ALL, 1)
    assert {n for n in one if n < 100} == set(range(6))


def test_bad_rows_of_a_stream_keep_their_place(files: list[str], write: Callable[..., str], tokenizer: Any) -> None:
    bad = write("bad.jsonl", [*rows(8, 100), {"prompt": "a"}, *rows(1, 109)])
    with pytest.raises(DataError, match=r"bad.jsonl:9: field 'completion' is missing"):
        read_stream([files[0], bad], size=20, mixture=ALL)
    left = read_stream([files[0], bad], size=20, mixture=ALL, bad_rows="skip").read(Place())
    assert {row.line for row in left.bad} <= {9}
