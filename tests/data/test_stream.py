"""Promise: a stream gives the same rows in the same order to any number of processes, goes on from any place, and
holds no more of a large file than of a small one."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.mixed_stream import read_stream
from shardproof.data.rows import read_rows
from shardproof.data.sources.readings import Lines, open_stream
from shardproof.data.stream import EncodedStream, Place, Position, dealt
from shardproof.errors import DataError


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(first, first + count)]


@pytest.fixture
def encoded(write: Callable[..., str], tokenizer: Any) -> Callable[..., EncodedStream]:
    """Two files of 25 and 12 rows, in blocks of ten."""
    files = [write("one.jsonl", rows(25)), write("two.jsonl", rows(12, 100))]

    def make(size: int = 10, **more: Any) -> EncodedStream:
        return EncodedStream(read_stream(files, size=size), tokenizer, 64, seed=3, **more)

    return make


def step(stream: EncodedStream, readers: int, count: int) -> list[list[Any]]:
    """The rows of each step of eight, over all readers and micro-batches in their order."""
    parts = [dealt(stream, Position(), 8 // readers, reader, readers) for reader in range(readers)]
    together = islice(zip(*parts, strict=True), count)
    return [[tuple(row["input_ids"]) for rows, *_ in ranks for row in rows] for ranks in together]


def test_the_same_rows_make_a_step_on_any_number_of_processes(encoded: Callable[..., EncodedStream]) -> None:
    alone = step(encoded(), 1, 14)
    assert step(pickle.loads(pickle.dumps(encoded())), 2, 14) == alone
    assert step(encoded(), 8, 14) == alone


def test_a_pass_has_every_row_once_and_the_next_one_another_order(encoded: Callable[..., EncodedStream]) -> None:
    seen = [row for rows in step(encoded(), 1, 37) for row in rows]  # eight passes
    passes = [seen[i : i + 37] for i in range(0, len(seen), 37)]
    assert all(Counter(one) == Counter(passes[0]) and len(set(one)) == 37 for one in passes)
    assert passes[0] != passes[1]
    assert Counter(passes[0][:10]) == Counter(passes[1][:10])  # a block is shuffled, and no row leaves it


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_it_ends_with_the_step_that_has_the_last_row_of_a_pass(
    encoded: Callable[..., EncodedStream], passes: int, packing: bool
) -> None:
    """Filled up from the next pass, as one that goes on would be; on any number of processes, from anywhere."""
    endless, ending = encoded(packing=packing), encoded(packing=packing, passes=passes)
    each = (position for _, position, _ in dealt(endless, Position(), 1, 0, 1))
    rows = len(list(takewhile(lambda position: position.place.passes < passes, each)))
    steps = -(-rows // 8)
    whole = step(endless, 1, steps)
    for readers, accumulation in ((1, 1), (2, 2), (1, 4)):
        micro = 8 // readers // accumulation
        parts = [list(dealt(ending, Position(), micro, n, readers, accumulation)) for n in range(readers)]
        assert [len(part) for part in parts] == [steps * accumulation] * readers
        got = [tuple(row["input_ids"]) for ranks in zip(*parts, strict=True) for found, *_ in ranks for row in found]
        assert got == [row for one in whole for row in one]
        for done in {1, steps}:
            _, position, _ = parts[0][done * accumulation - 1]
            left = list(dealt(ending, position, micro, 0, readers, accumulation))
            assert [found for found, *_ in left] == [found for found, *_ in parts[0][done * accumulation :]]


def test_an_end_is_seen_where_the_last_block_is_full(write: Callable[..., str], tokenizer: Any) -> None:
    """Of twenty rows in blocks of ten, and of ten rows behind which none can be used."""
    long = [{"query": "x", "response": "holds " * 99}] * 12
    for lines in (rows(20), [*rows(20), *long]):
        stream = EncodedStream(read_stream([write("full.jsonl", lines)], size=10), tokenizer, 64, passes=1)
        assert len(list(dealt(stream, Position(), 5, 0, 1, 2))) == 4


@pytest.mark.parametrize("packing", [False, True])
def test_it_goes_on_where_it_was(encoded: Callable[..., EncodedStream], packing: bool) -> None:
    whole = list(islice(dealt(encoded(packing=packing), Position(), 2, 0, 2), 60))
    for at in (0, 3, 7, 30, 48):
        _, position, _ = whole[at]
        place, taken = json.loads(json.dumps(position))
        again = dealt(encoded(packing=packing), Position(Place(*place), taken), 2, 0, 2)
        assert [rows for rows, *_ in islice(again, 10)] == [rows for rows, *_ in whole[at + 1 : at + 11]]


def test_packed_rows_hold_every_row_once(encoded: Callable[..., EncodedStream]) -> None:
    block = next(encoded(size=37, packing=True).blocks(Place()))
    assert len(block.rows) < 37
    assert sum(len(row["seq_lengths"]) for row in block.rows) == 37


FILES = {
    "rows.jsonl": rows(23),
    "rows.csv": "prompt,completion\n" + "".join(f'"{i} +\n1 =", {i}\n\n' for i in range(23)),
    "stdlib": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "rows.parquet"])
def test_each_kind_is_read_from_any_place_as_it_is_read_whole(
    name: str, write: Callable[..., str], tmp_path: Path
) -> None:
    file = name
    if name == "rows.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows(23)), file := str(tmp_path / name), row_group_size=7)
    elif FILES[name]:
        file = write(name, FILES[name])
    whole = [(row.line, row.messages) for row in islice(read_rows([file]), 23)]
    stream = read_stream([file], size=1)
    place, found, places = Place(), [], []
    for _ in range(23):
        places.append(place)
        read = stream.read(place)
        found += [(row.line, row.messages) for row in read.rows]
        place = read.after
    assert found == whole
    for at in (0, 1, 6, 7, 13, 22):
        (row,) = read_stream([file], size=1).read(places[at]).rows
        assert (row.line, row.messages) == whole[at]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: Any) -> None:
    """Of what Python holds, the most while all of a file is read: the same for ten times as many rows."""

    def most(count: int) -> int:
        file = tmp_path / f"{count}.jsonl"
        with file.open("w") as out:
            out.writelines(json.dumps({"prompt": f"{i}", "completion": "a b c " * 20}) + "\n" for i in range(count))
        stream = EncodedStream(read_stream([str(file)], size=50), tokenizer, 256)
        blocks = stream.blocks(Place())
        next(blocks)
        tracemalloc.start()
        seen = sum(len(block.rows) for block in islice(blocks, count // 50 - 1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seen == count - 50
        return peak

    assert most(5000) < 1.2 * most(500)


def test_the_first_so_many_rows_of_a_file(encoded: Callable[..., EncodedStream], write: Callable[..., str]) -> None:
    file = write("many.jsonl", rows(30))
    stream = read_stream([f"{file}#4", f"{file}#2"], size=5)
    first = stream.read(Place())
    second = stream.read(first.after)
    assert [row.line for row in (*first.rows, *second.rows)] == [1, 2, 3, 4, 1, 2]
    assert second.after == Place(1)


def test_a_bad_row_stops_or_is_left_out_when_it_is_reached(write: Callable[..., str], tokenizer: Any) -> None:
    file = write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows(30)) + "{bad\n" + '{"prompt": 1}\n')
    stop = EncodedStream(read_stream([file], size=10), tokenizer, 64)
    with pytest.raises(DataError, match=r"rows.jsonl:31: not JSON"):
        list(islice(stop.blocks(Place()), 4))
    skip = EncodedStream(read_stream([file], size=10), tokenizer, 64, bad_rows="skip")
    *_, last, again = islice(skip.blocks(Place()), 5)
    assert [str(row).partition(": ")[0] for row in last.bad] == [f"{file}:31", f"{file}:32"]
    assert len(last.rows) == 0
    assert len(again.rows) == 10


def test_what_is_wrong_from_the_beginning_is_told_before_training(write: Callable[..., str], tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"bad.jsonl:1: not JSON"):
        read_stream([write("good.jsonl", rows(3)), write("bad.jsonl", "no\n")])
    with pytest.raises(DataError, match=r"Write it as JSON Lines"):
        read_stream([write("list.json", rows(3))])
    with pytest.raises(DataError, match=r"has no rows"):
        read_stream([write("empty.csv", "prompt,completion\n")])
    long = EncodedStream(read_stream([write("long.jsonl", rows(3))]), tokenizer, 2)
    with pytest.raises(DataError, match="Every row is longer than --max-length 2"):
        next(iter(islice(long.blocks(Place()), 1, 2)), None)


def test_the_look_at_a_file_is_at_no_other(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of small files each would be read once for every file before it that a block has room for."""
    opened: list[int] = []
    reading = Lines.reading
    monkeypatch.setattr(Lines, "reading", lambda self, at=None: opened.append(1) or reading(self, at))
    read_stream([write(f"{name}.jsonl", rows(3)) for name in range(8)])
    assert len(opened) == 2 * 8  # whether it is empty, and its block
    with pytest.raises(DataError, match=r"^1 of 4 rows cannot be used:\n  \S+odd.jsonl:4: not JSON"):
        odd = "".join(json.dumps(row) + "\n" for row in rows(3)) + "no\n"
        read_stream([write("0.jsonl", rows(3)), write("odd.jsonl", odd), write("1.jsonl", rows(3))])


def test_a_file_that_became_another_is_not_read_on(write: Callable[..., str]) -> None:
    source = open_stream(write("rows.jsonl", rows(9)), {})
    reading = source.reading()
    list(islice(reading, 4))
    at = reading.at()
    assert next(iter(source.reading(at)))[0] == 5
    write("rows.jsonl", rows(9, 1000))
    with pytest.raises(DataError, match="has changed since the checkpoint was written"):
        source.reading(at)
