"""Rows with files that were encoded before are taken from a folder, and only if nothing about them has changed."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding import dated
from shardproof.data.forms.formats import SFT
from shardproof.data.media import encode as media_encode
from shardproof.data.media.batches import MediaCollator
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.row_cache import RowCache
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.loading.processors import load_processor

ROWS = [
    {"query": "<image>which digit?", "response": "two", "images": ["a.png"]},
    {"query": "no file", "response": "none"},
    {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
]


@pytest.fixture(scope="module")
def processor(tiny_models) -> Any:
    return load_processor(str(tiny_models("qwen2_5_vl")), False)


@pytest.fixture
def place(tmp_path: Path, files: Path) -> Path:
    for name in ("a.png", "b.png"):
        shutil.copy(files / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """How many files of each row that was encoded anew were read."""
    seen: list[int] = []
    own = media_encode.files_of

    def files_of(row: Any, limits: Limits) -> Any:
        found = own(row, limits)
        seen.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(media_encode, "files_of", files_of)
    return seen


def encoded(place: Path, processor: Any, rows: list[dict[str, Any]] = ROWS, cache: bool = True, **more: Any) -> Any:
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_length": more.pop("max_length", 1024), "bad_rows": more.pop("bad_rows", "stop")}
    limits = Limits(max_pixels=more.pop("max_pixels", None), remote=more.pop("remote", False))
    encoder = MediaEncoder(processor, limits, **more)
    kept = RowCache(place / "kept", encoder) if cache else None
    rows_ = read_rows([str(file)], form=SFT)
    found = encode_media_rows(rows_, encoder, cache=kept, **options)
    return [{name: list(found[i][name]) for name in ("input_ids", "labels")} for i in range(len(found))]


def test_the_second_time_no_file_is_read(place: Path, processor: Any, read: list[int]) -> None:
    first = encoded(place, processor, cache=False)
    assert sorted(read) == [0, 1, 2]
    assert encoded(place, processor) == first
    read.clear()
    assert encoded(place, processor) == first
    assert encoded(place, processor, [*ROWS[1:], *ROWS[:1]], max_length=512) == [*first[1:], *first[:1]]
    assert read == []
    assert len(list((place / "kept").glob("*/*"))) == 1


def test_a_row_that_is_new_is_encoded_and_kept_too(place: Path, processor: Any, read: list[int]) -> None:
    encoded(place, processor)
    read.clear()
    more = [*ROWS, {"query": "<image> again?", "response": "two", "images": ["a.png"]}]
    found = encoded(place, processor, more)
    assert read == [1]
    assert encoded(place, processor, more) == found
    assert read == [1]


@pytest.mark.parametrize(
    "other",
    [{"loss": "last_round"}, {"system": "be brief"}, {"max_pixels": 28 * 28}],
    ids=lambda other: next(iter(other)),
)
def test_what_is_encoded_otherwise_is_encoded_again(place, processor, read: list[int], other: dict[str, Any]) -> None:
    encoded(place, processor)
    read.clear()
    assert encoded(place, processor, **other) == encoded(place, processor, cache=False, **other)
    assert sorted(read) == [0, 0, 1, 1, 2, 2]


def test_so_it_is_by_another_processor(place: Path, processor: Any, read: list[int], tiny_models) -> None:
    encoded(place, processor)
    read.clear()
    other = load_processor(str(tiny_models("qwen2_5_vl")), False)
    other.chat_template = other.tokenizer.chat_template = other.tokenizer.chat_template + "{{ '' }}"
    encoded(place, other)
    assert sorted(read) == [0, 1, 2]


def that_asks(form: str, tiny_models: Any) -> Any:
    """A processor whose template writes the date, or the time, in this form."""
    made = load_processor(str(tiny_models("qwen2_5_vl")), False)
    made.chat_template = made.tokenizer.chat_template = f"{{{{ strftime_now('{form}') }}}} {made.chat_template}"
    return made


def test_a_template_that_asks_the_time_gets_that_of_before(place: Path, tiny_models, caplog) -> None:
    """Templates of Llama 3.2 write the date: the rows of a run that passes midnight had other tokens than before."""
    encoder = MediaEncoder(that_asks("%S.%f", tiny_models), Limits())
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = encode_media_rows(read_rows([str(place / "rows.jsonl")], form=SFT), encoder, max_length=1024)
    batch = MediaCollator(encoder, on_lost="stop")([found[i] for i in range(3)])
    assert batch["input_ids"].shape[0] == 3
    assert not caplog.records


def test_rows_that_say_the_day_are_encoded_again_on_another(place, tiny_models, read: list[int], monkeypatch) -> None:
    asks = that_asks("%d %b %Y", tiny_models)
    before = encoded(place, asks)
    read.clear()
    assert encoded(place, asks) == before
    assert read == []

    monkeypatch.setattr(dated, "today", lambda: date(2001, 2, 3))
    later = that_asks("%d %b %Y", tiny_models)
    after = encoded(place, later)
    assert sorted(read) == [0, 1, 2]
    assert "03 Feb 2001" in later.tokenizer.decode(after[1]["input_ids"])
    assert before != after
    assert encoded(place, asks) == before  # a run that has passed midnight
    assert encoded(place, pickle.loads(pickle.dumps(asks))) == before  # and its ranks


def test_a_file_that_has_changed_is_read_again(place: Path, processor: Any, read: list[int]) -> None:
    before = encoded(place, processor)
    read.clear()
    shutil.copy(place / "b.png", place / "a.png")
    os.utime(place / "a.png", (1, 1))
    found = encoded(place, processor)
    assert sorted(read) == [1, 2]
    assert found == encoded(place, processor, cache=False)
    assert found[1] == before[1]


def test_arguments_in_another_order_are_another_row(place: Path, processor: Any) -> None:
    """Templates write tools in the order of their fields: other tokens were taken, and the row was lost in training."""
    schema = {"a": {"type": "integer"}, "b": {"type": "string"}}
    cache = RowCache(place / "kept", MediaEncoder(processor, Limits()))
    tools = [{"tools": [{"properties": one}]} for one in (schema, dict(reversed(schema.items())))]
    turns = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "done"}]
    assert len({cache.name(Row(turns, "rows.jsonl", 1, extra)) for extra in (*tools, tools[0])}) == 2


def test_an_address_that_may_not_be_read_is_a_bad_row_here_too(place: Path, processor: Any, monkeypatch) -> None:
    """A row that a run with --allow-remote-media had encoded passed in one without it, and was lost in training."""
    picture = (place / "a.png").read_bytes()
    monkeypatch.setattr("shardproof.data.sources.remote.fetched", lambda *args: picture)
    rows = [{**ROWS[0], "images": ["http://127.0.0.1:1/a.png"]}]
    assert encoded(place, processor, rows, remote=True) == encoded(place, processor, rows, remote=True)
    with pytest.raises(DataError, match="a network address, which is not fetched"):
        encoded(place, processor, rows)


def test_a_file_that_is_gone_is_a_bad_row(place: Path, processor: Any) -> None:
    whole = encoded(place, processor)
    (place / "b.png").unlink()
    assert encoded(place, processor, bad_rows="skip") == whole[:2]
    shutil.copy(place / "a.png", place / "b.png")
    assert len(encoded(place, processor)) == 3


def test_a_run_that_is_killed_has_kept_what_it_had_encoded(place, processor, read: list[int], monkeypatch) -> None:
    more = [*ROWS, {"query": "none", "response": "a"}, {"query": "one", "response": "b"}]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("shardproof.data.row_cache.AT_ONCE", 2)
        patch.setattr("shardproof.data.media.rows.pass_over", lambda *args: 1 / 0)
        encoded(place, processor, more)
    assert len(list((place / "kept").glob("*/*.arrow"))) == 3
    assert len(read) == 5
    assert len(encoded(place, processor, more)) == 5
    assert len(read) == 5


def test_what_is_damaged_is_passed_over(place: Path, processor: Any, read: list[int], caplog) -> None:
    whole = encoded(place, processor)
    (file,) = (place / "kept").glob("*/*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    read.clear()
    assert encoded(place, processor) == whole
    assert sorted(read) == [0, 1, 2]
    assert f"{file} is ignored, and its rows are encoded again" in caplog.text
    read.clear()
    assert encoded(place, processor) == whole
    assert read == []


def test_a_folder_that_cannot_be_written_is_told(place: Path, processor: Any, caplog, monkeypatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(encoded(place, processor)) == 3
    assert "Encoded rows are not kept: " in caplog.text
    assert "No space left on device" in caplog.text
    assert list((place / "kept").glob("*/*")) == []
    (place / "kept").rename(place / "moved")
    (place / "kept").write_text("a file")
    with pytest.raises(ConfigError, match=r"--row-cache .*kept cannot be used: "):
        encoded(place, processor)


def test_a_file_system_that_is_only_read_keeps_nothing_and_is_no_error(place, processor, caplog, monkeypatch) -> None:
    """Where nothing can be written nothing can be removed either, not even what is not there."""
    import pyarrow as pa

    def refused(*args: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    whole = encoded(place, processor, ROWS[:1])
    monkeypatch.setattr(pa, "OSFile", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert encoded(place, processor)[:1] == whole
    assert "cannot be written: Read-only file system" in caplog.text


def test_the_option_says_where(place: Path, processor: Any, read: list[int], tiny_models) -> None:
    from shardproof.train.options.config import SftConfig
    from shardproof.train.sft import recipe as sft

    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = SftConfig(
        model=str(tiny_models("qwen2_5_vl")), dataset=[str(file)], row_cache=str(place / "kept"), workers=0
    )
    rows, _ = sft.read(config)
    first = sft.encode(config, rows, processor)
    assert sorted(read) == [0, 1, 2]
    config.packing = True
    second = sft.encode(config, rows, processor).unpacked
    assert sorted(read) == [0, 1, 2]
    assert second.encoded.to_dict() == first.encoded.to_dict()


def test_so_it_is_where_code_of_a_part_has_changed(place, processor, tiny_models, monkeypatch) -> None:
    """Pictures may be prepared by code of the model's folder, which takes more files: rows of before it changed were
    taken, of another length than those in training."""
    code = place / "code"
    code.mkdir()
    for name in ("pictures.py", "beside.py"):
        (code / name).write_text("SIDE = 28\n")
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    other = load_processor(str(tiny_models("qwen2_5_vl")), False)
    made = type("Own", (type(other.image_processor),), {"__module__": importlib.import_module("pictures").__name__})
    other.image_processor.__class__ = made
    folders = [RowCache(place / "kept", MediaEncoder(one, Limits())).folder for one in (processor, other, other)]
    assert folders[0] != folders[1] == folders[2]
    for name in ("pictures.py", "beside.py"):
        (code / name).write_text("SIDE = 56\n")
        folders.append(RowCache(place / "kept", MediaEncoder(other, Limits())).folder)
    assert len(set(folders)) == 4


def test_rows_of_another_part_for_pictures_are_encoded_again(place: Path, processor: Any, tiny_models) -> None:
    """transformers' part with torchvision and its part with PIL are saved alike: a run took the rows of the other."""
    other = load_processor(str(tiny_models("qwen2_5_vl")), False)
    name = type(other.image_processor).__name__
    name = name.removesuffix("Pil") if name.endswith("Pil") else f"{name}Pil"
    other.image_processor.__class__ = type(name, (type(other.image_processor),), {"__module__": "transformers.other"})
    one, two = (RowCache(place / "kept", MediaEncoder(made, Limits())).folder for made in (processor, other))
    assert one != two
