"""Promise: MS::OWNER/NAME is a model or a dataset of ModelScope's hub, from the cache where nobody answers."""

from __future__ import annotations

import http.server
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import parse_qs, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardproof.data.sources import modelscope
from shardproof.errors import ConfigError

NOBODY = "http://127.0.0.1:9"
COLUMNS = ("--columns", "query=question,response=answer")


def parquet(count: int) -> bytes:
    file = io.BytesIO()
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


class Hub(http.server.BaseHTTPRequestHandler):
    """What modelscope.cn says of one model, org/tiny, and one dataset, org/sums."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {}

    def do_GET(self) -> None:
        asked = urlparse(self.path)
        repository, _, what = asked.path.removeprefix("/api/v1/").partition("/repo")
        files = self.files.get(repository)
        if files is None:
            self.answer(json.dumps({"Code": 10010205001, "Message": "no such repository", "Success": False}), 404)
        elif what:
            listed = [{"Path": name, "Name": name, "Type": "blob", "Size": len(data)} for name, data in files.items()]
            self.answer(json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}))
        else:
            self.answer(files[parse_qs(asked.query)["FilePath"][0]])

    do_HEAD = do_GET

    def answer(self, body: str | bytes, code: int = 200) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint(tiny: Path) -> Iterator[str]:
    Hub.files = {
        "models/org/tiny": {file.name: file.read_bytes() for file in tiny.iterdir()},
        "datasets/org/sums": {"train.parquet": parquet(20), "test.parquet": parquet(3)},
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


def shardproof(home: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """With no Hugging Face hub at all."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("MODELSCOPE_")}
    environment |= {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": NOBODY, "NO_PROXY": "127.0.0.1"}
    environment |= {"MODELSCOPE_CACHE": str(home / "cache"), "MODELSCOPE_ENDPOINT": endpoint}
    command = [sys.executable, "-m", "shardproof.cli", *words]
    return subprocess.run(command, cwd=home, env=environment, text=True, capture_output=True, timeout=180)


@pytest.mark.slow
def test_a_model_is_trained_on_rows_and_both_are_in_the_cache_then(home: Path, endpoint: str) -> None:
    training = ("sft", "--model", "MS::org/tiny", "--dataset", "MS::org/sums", "--val-dataset", "ms::org/sums@test")
    training += (*COLUMNS, "--max-steps", "1", "--per-device-batch-size", "1")
    run = shardproof(home, endpoint, *training, "--nproc", "2", "--stage", "3", "--output-dir", "run")
    assert run.returncode == 0, run.stderr
    assert "20 rows, 3 to evaluate on" in run.stdout
    again = shardproof(home, NOBODY, "data", "show", *training[1:5], *COLUMNS, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[0])["where"].startswith("MS::org/sums:")
    asked = shardproof(home, NOBODY, "plan", "--model", "MS::org/tiny", "--gpus", "1", "--stage", "0", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["parameters"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "MS::org/none", "--dataset", "stdlib#4"), ["no model org/none", "no such repository"]),
        (("--model", "tiny", "--dataset", "MS::org/none"), ["no dataset org/none", "no such repository"]),
        (("--model", "tiny", "--dataset", "MS::org/sums@dev"), ["dev", "train", "test", "OWNER/NAME@SPLIT"]),
        (("--model", "MS::tiny", "--dataset", "stdlib#4"), ["MS::tiny", "MS::OWNER/NAME"]),
    ],
)
def test_what_the_hub_does_not_have_is_said(home: Path, endpoint: str, words: tuple[str, ...], said: list[str]) -> None:
    run = shardproof(home, endpoint, "data", "show", *words)
    assert run.returncode == 2
    assert all(part in run.stderr for part in said), run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("words", [("--model", "MS::org/never"), ("--model", "tiny", "--dataset", "MS::org/never")])
def test_what_is_not_in_the_cache_is_no_long_wait_without_the_hub(home: Path, words: tuple[str, ...]) -> None:
    run = shardproof(home, NOBODY, "data", "show", *words)
    assert run.returncode == 2
    assert all(part in run.stderr for part in ("org/never", "cannot be reached", "refused")), run.stderr


def test_without_its_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub.compat", None)
    with pytest.raises(ConfigError, match=r"shardproof\[modelscope\]"):
        modelscope.fetch("model", "org/tiny")
