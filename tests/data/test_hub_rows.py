"""Promise: a dataset of the hub is read as a file is, from the cache where nobody answers; what is none says so."""

from __future__ import annotations

import http.server
import io
import json
import os
import pickle
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardproof.data.mixed_stream import read_stream
from shardproof.data.rows import read_rows
from shardproof.data.sources.hub import HubName, hub_name
from shardproof.data.stream import Place
from shardproof.errors import DataError

COMMIT = "1" * 40
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]


def parquet(rows: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


FILES = {"train.parquet": parquet(ROWS), "test.parquet": parquet(ROWS[:3])}


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface.co says of one dataset, org/sums, that has two files."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        listed = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
        told = {"id": "org/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        if path == f"/api/datasets/org/sums/tree/{COMMIT}":
            self.answer(json.dumps(listed).encode())
        elif path in ("/api/datasets/org/sums", f"/api/datasets/org/sums/revision/{COMMIT}"):
            self.answer(json.dumps(told | {"private": False, "disabled": False}).encode())
        elif "/org/sums/resolve/" in path and path.rpartition("/")[2] in FILES:
            self.answer(FILES[path.rpartition("/")[2]], ETag=f'"{path}"', **{"X-Repo-Commit": COMMIT})
        else:
            code = "EntryNotFound" if "org/sums" in path else "RepoNotFound"
            self.answer(b"{}", 404, **{"X-Error-Code": code})

    do_HEAD = do_GET

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


def shardproof(
    home: Path, endpoint: str, *words: str, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment |= {"HF_HOME": str(home / "home"), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "shardproof.cli", *words]
    return subprocess.run(
        command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr, timeout=120
    )


COLUMNS = ("--model", "tiny", "--columns", "query=question,response=answer")


@pytest.mark.slow
def test_rows_of_the_hub_are_trained_on_and_then_in_the_cache(home: Path, endpoint: str) -> None:
    training = ("sft", *COLUMNS, "--max-steps", "1", "--output-dir", "run", "--per-device-batch-size", "1")
    run = shardproof(home, endpoint, *training, "--dataset", "org/sums", "--val-dataset", "org/sums@test")
    assert run.returncode == 0, run.stderr
    assert "20 rows, 3 to evaluate on" in run.stdout
    assert run.stderr.count("fetching org/sums from the hub") == 1
    nobody = "http://127.0.0.1:9"
    shown = shardproof(home, nobody, "data", "show", *COLUMNS, "--dataset", "HF::org/sums@test#2", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout.splitlines()[0])["where"].startswith("HF::org/sums@test:")
    assert "fetching" not in shown.stderr


@pytest.mark.slow
def test_rows_of_the_hub_are_trained_on_while_they_are_fetched(home: Path, endpoint: str) -> None:
    training = ("sft", *COLUMNS, "--max-steps", "2", "--per-device-batch-size", "3", "--shuffle-buffer-size", "8")
    where = ("--streaming", "--dataset", f"org/sums@train@{COMMIT}", "--output-dir", "streamed")
    run = shardproof(home, endpoint, *training, *where)
    assert run.returncode == 0, run.stderr
    assert "rows are read while training" in run.stdout
    assert len((home / "streamed" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.slow
def test_what_is_fetched_shows_how_far_it_is(home: Path, endpoint: str) -> None:
    """On a terminal, as the bars of `datasets`; what is in the cache is not fetched."""
    (home / "empty").mkdir()
    words = ("data", "show", *COLUMNS, "--dataset", "org/sums@test")
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    for url, fetched in ((endpoint, True), ("http://127.0.0.1:9", False)):
        run = shardproof(home / "empty", url, *words, stderr=theirs)
        os.write(theirs, b".")
        said = os.read(terminal, 1 << 16).decode()
        assert run.returncode == 0, said
        assert ("Generating test split" in said) == fetched, said
    os.close(theirs)
    os.close(terminal)


def test_a_place_in_a_dataset_of_the_hub_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of several rows each, as the hub's are: `datasets` keeps the place."""
    import datasets

    def load(*args: object, **kwargs: object) -> datasets.IterableDataset:
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    stream = read_stream(["org/sums"], size=1, columns={"query": "question", "response": "answer"})
    place, places, found = Place(), [], []
    while place.passes == 0:
        places.append(place)
        read = stream.read(place)
        found += read.rows
        place = read.after
    assert [row.messages[0]["content"] for row in found] == [row["question"] for row in ROWS]
    assert [row.line for row in found] == list(range(1, 21))
    for at in (0, 6, 7, 13, 19):
        where = Place(*json.loads(json.dumps(places[at])))
        assert stream.read(where).rows == [found[at]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/nothing", ["There is no file org/nothing", "org/nothing", "doesn't exist"]),
        ("org/sums@validation", ["validation", "train", "test", "OWNER/NAME@SPLIT"]),
        ("org/sums:hard", ["hard", "OWNER/NAME:SUBSET"]),
    ],
)
def test_what_the_hub_does_not_have_is_said(home: Path, endpoint: str, name: str, said: list[str]) -> None:
    run = shardproof(home, endpoint, "data", "show", "--model", "tiny", "--dataset", name)
    assert run.returncode == 2
    assert all(part in run.stderr for part in said), run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_what_is_not_in_the_cache_is_no_long_wait_without_the_hub(home: Path) -> None:
    run = shardproof(home, "http://127.0.0.1:9", "data", "show", "--model", "tiny", "--dataset", "org/never")
    assert run.returncode == 2
    assert all(part in run.stderr for part in ("org/never", "cannot be reached", "refused")), run.stderr
    assert "fetching" not in run.stderr


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_name("org/name") == HubName("org", "name", None, "train")
    assert hub_name("HF::org/name-1.0:sub.set@test[:10%]") == HubName("org", "name-1.0", "sub.set", "test[:10%]")
    assert hub_name("org/name:sub@train@v1.0/x") == HubName("org", "name", "sub", "train", "v1.0/x")
    assert hub_name("hf::here/name") == HubName("here", "name", None, "train")
    for text in ("here/name", "rows.jsonl", "org/rows.jsonl", "/org/name", "./org/name", "a/b/c", "stdlib"):
        assert hub_name(text) is None
    assert hub_name("ms::org/name") == HubName("org", "name", None, "train", modelscope=True)
    with pytest.raises(DataError, match="There is no file here/name"):
        read_rows(["here/name"])


def test_a_source_of_the_hub_crosses_to_another_process_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its table, which may be larger than memory."""
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(ROWS))
    rows = read_rows(["org/sums"], columns={"query": "question", "response": "answer"})
    parcel = pickle.dumps(rows)
    assert len(parcel) < 1000
    assert pickle.loads(parcel)[7] == rows[7]
    assert rows[7].where == "org/sums:8"
