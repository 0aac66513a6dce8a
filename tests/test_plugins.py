"""Files of the user's own: what they register, and what is said of those that cannot be used."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof
from shardproof.data.forms.converted import converted
from shardproof.data.forms.formats import SUPERVISED
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.plugins import KINDS, load

FOCAL = """
import shardproof

@shardproof.register_loss("focal")
def focal(outputs, labels, num_items_in_batch):
    return 0.0
"""


@pytest.fixture
def write(tmp_path: Path, request: pytest.FixtureRequest):
    """`write(text)`: a plugin file. Module names are for the whole process, so each test has its own."""
    number = iter(range(100))

    def make(text: str, name: str | None = None) -> str:
        file = tmp_path / (name or f"plugin_{abs(hash(request.node.name))}_{next(number)}.py")
        file.write_text(text)
        return str(file)

    return make


def test_what_a_file_registers_is_found_by_kind_and_name(write) -> None:
    kinds = [kind.replace(" ", "_") for kind in KINDS]
    text = "import shardproof\n" + "".join(
        f"@shardproof.register_{k}('mine')\ndef {k}(): return '{k}'\n" for k in kinds
    )
    plugins = load([write(text)])
    assert [plugins.find(kind, "mine")() for kind in KINDS] == kinds
    assert plugins.find("loss", "answer") is None
    assert all(hasattr(shardproof, f"register_{kind}") for kind in kinds)


def test_names_do_not_leak_from_one_command_to_the_next(write) -> None:
    first, second = write(FOCAL), write(FOCAL.replace("focal", "other"))
    assert load([first]).names("loss") == ["focal"]
    assert load([second]).names("loss") == ["other"]
    assert load([first, second]).names("loss") == ["focal", "other"]
    assert load([first, first]).names("loss") == ["focal"]
    assert load([]).names("loss") == []


def test_a_file_that_is_imported_by_others_only_defines(write, monkeypatch) -> None:
    file = Path(write(FOCAL))
    monkeypatch.syspath_prepend(file.parent)
    assert __import__(file.stem).focal(1, 2, 3) == 0.0


def test_what_a_file_defines_and_imports_is_found_again_in_a_process_of_its_own(write) -> None:
    helper = Path(write("LOSS = 7.0\n"))
    text = FOCAL.replace("0.0", f"{helper.stem}.LOSS").replace("import shardproof", f"import shardproof, {helper.stem}")
    plugins = load([write(text)])
    again = pickle.loads(pickle.dumps(plugins))
    assert again.find("loss", "focal") is plugins.find("loss", "focal")
    code = (
        "import pickle, sys; p, f = pickle.load(sys.stdin.buffer); print(p.find('loss', 'focal')(1, 2, 3), f(1, 2, 3))"
    )
    parcel = pickle.dumps((plugins, plugins.find("loss", "focal")))
    done = subprocess.run([sys.executable, "-c", code], input=parcel, capture_output=True, env=os.environ)
    assert done.stdout.decode().split() == ["7.0", "7.0"], done.stderr.decode()


@pytest.mark.parametrize(
    "text, said",
    [
        ("x = 1\n", "registers nothing"),
        (
            "def f():\n    return nowhere\n\nf()\n",
            r"line 2: NameError: name 'nowhere' is not defined\.\n  return nowhere",
        ),
        ("import json\njson.loads('{')\n", r"line 2: JSONDecodeError.*\n  json.loads"),
        ("def (\n", r"line 1: invalid syntax"),
        ("import nonesuch\n", r"line 1: ModuleNotFoundError: No module named 'nonesuch'"),
        ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
        (FOCAL + FOCAL, r"line 10: the loss 'focal' is already registered, at .*:4"),
        (FOCAL.replace("focal", "all"), "one of shardproof's own"),
        (
            FOCAL.replace('("focal")', ""),
            r'line 4: @register_loss needs a name in parentheses: @shardproof.register_loss\("',
        ),
        ("import shardproof\nshardproof.register_loss('f')(3)\n", "a function or a class, not a int"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(write, text: str, said: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load([file])
    assert re.search(said, str(caught.value)), caught.value
    assert file in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_files_that_are_none_or_cannot_stand_beside_each_other(write, tmp_path: Path) -> None:
    file = write(FOCAL, "my_plugin_file.py")
    (tmp_path / "sub").mkdir()
    for name, said in [
        (str(tmp_path / "my_plugin_fil.py"), "there is no such file. Did you mean .*my_plugin_file.py"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "rows.jsonl"), r"a Python file \(.py\)"),
        (write(FOCAL, "json.py"), "a module 'json' already exists"),
        (write(FOCAL, "peft.py"), "a module 'peft' already exists"),
    ]:
        with pytest.raises(ConfigError, match=said):
            load([name])
    with pytest.raises(ConfigError, match=r"'focal' is already registered, at .*my_plugin_file.py:4"):
        load([file, write(FOCAL)])
    with pytest.raises(ConfigError, match="a module 'my_plugin_file' already exists"):
        load([file, write(FOCAL.replace("focal", "x"), "sub/my_plugin_file.py")])


def test_an_unknown_name_is_answered_with_the_nearest(write) -> None:
    plugins = load([write(FOCAL)])
    with pytest.raises(
        ConfigError,
        match=r"--loss focl: there is no such loss\. Did you mean focal\?\nKnown: answer, last_round,",
    ):
        plugins.find("loss", "focl")
    with pytest.raises(ConfigError, match=r'--row-format x: .*\n@shardproof.register_row_format\("x"\) in a file'):
        load([]).find("row format", "x")


def test_a_row_format_brings_records_into_a_known_form(write, tmp_path: Path) -> None:
    text = """
import shardproof

@shardproof.register_row_format("pairs")
def pairs(record):
    if record["n"] < 0:
        raise ValueError("n is negative")
    return {"query": record.pop("q"), "response": str(record["n"])} if record["n"] else None
"""
    convert = load([write(text)]).find("row format", "pairs")
    file = tmp_path / "rows.json"
    file.write_text('[{"q": "one", "n": 1}]')
    rows = read_rows([file], form=converted(SUPERVISED, "pairs", convert))
    assert [message["content"] for message in rows[0].messages] == ["one", "1"]
    assert rows[0].messages == rows[0].messages  # asked twice: what the function does to a record stays its own
    file.write_text('[{"q": "one", "n": -1}, {"q": "one"}, {"q": "a", "n": 0}, {"q": "", "n": 2}]')
    with pytest.raises(DataError) as caught:
        read_rows([file], form=converted(SUPERVISED, "pairs", convert))
    for said in (
        "rows.json:1: n is negative",
        "the row format 'pairs' fails: KeyError: 'n'",
        "'pairs' returned null, not an object",
        "field 'query' is empty",
        "Expected: rows that the row format 'pairs' converts into an object",
    ):
        assert said in str(caught.value)
