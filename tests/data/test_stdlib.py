"""The embedded rows: real text, the same every time, without touching anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardproof.data.rows import read_rows
from shardproof.data.sources.stdlib import LONGEST, SHORTEST, collect, first_paragraph, stdlib_rows

DIGEST = (
    "import sys, hashlib, json; from shardproof.data.sources.stdlib import stdlib_rows;"
    "print(hashlib.sha256(json.dumps(stdlib_rows()).encode()).hexdigest(), 'torch' in sys.modules)"
)


def test_there_are_a_few_thousand_useful_rows():
    rows = stdlib_rows()
    assert 3000 < len(rows) < 10000
    by_question = {row["query"]: row["response"] for row in rows}
    assert by_question["What does textwrap.dedent do?"].startswith("Remove any common leading whitespace")
    assert by_question["How is textwrap.indent called?"] == "textwrap.indent(text, prefix, predicate=None)"
    answers = [row["response"] for row in rows]
    assert len(set(answers)) == len(answers)
    assert all(len(answer) <= LONGEST and answer.isprintable() for answer in answers)
    assert not any(" at 0x" in answer for answer in answers)


def test_rows_are_the_same_in_another_process_home_and_hash_seed(tmp_path):
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-W", "error", "-c", DIGEST]
        outputs.add(subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout)
    assert len(outputs) == 1
    assert outputs.pop().endswith("False\n")


def test_rows_do_not_depend_on_what_was_imported_before():
    fresh = stdlib_rows()
    import torch  # noqa: F401 - it replaces functions of inspect
    import transformers  # noqa: F401 - it hangs methods on logging.Logger

    assert collect() != fresh, "if this ever fails, a process of its own is no longer needed"
    assert stdlib_rows() == fresh


@pytest.mark.slow
def test_a_limit_spreads_over_the_whole_library():
    some = stdlib_rows(100)
    assert len(some) == 100
    assert some[0] == stdlib_rows()[0]
    assert "zip" in some[-1]["query"] or "zlib" in some[-1]["query"]
    assert stdlib_rows(10**6) == stdlib_rows()


def test_read_rows_knows_them_by_name():
    rows = read_rows(["stdlib#200"])
    assert len(rows) == 200
    assert rows[0].source == "stdlib"


def test_a_docstring_becomes_its_first_paragraph():
    assert (
        first_paragraph("join(a, *p) -> str\n\nJoin two or more\n  pathnames.\n\nMore.")
        == "Join two or more pathnames."
    )
    assert first_paragraph("x" * (SHORTEST - 1)) is None
    assert first_paragraph(">>> print('a long enough example')") is None
    assert first_paragraph(None) is None
