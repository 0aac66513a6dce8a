"""Files that rows name by an address are fetched where that is allowed, within limits; what goes wrong says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from shardproof.cli.main import main
from shardproof.data.forms.parts import Problem
from shardproof.data.media.batches import MediaCollator
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.reading import files_of
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import Row, read_rows
from shardproof.data.sources.remote import fetched
from shardproof.errors import DataError
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.media import media_limits

FEW = {"remote": True, "remote_bytes": 10_000, "remote_seconds": 0.5}


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[str]:
    """The address of a server on this machine that answers well, badly, or not at all."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            if name in ("here", "away"):
                self.send_response(302)
                self.send_header("Location", "/a.png" if name == "here" else "ftp://127.0.0.1/a.png")
                self.end_headers()
            elif name == "silent":
                over.wait(30)
            elif name in ("endless", "dripping"):
                self.send_response(200)
                self.end_headers()
                while not over.wait(0.1 if name == "dripping" else 0):
                    try:
                        self.wfile.write(b"x" if name == "dripping" else bytes(1000))
                    except OSError:
                        return
            elif name in ("large", "short"):
                self.send_response(200)
                self.send_header("Content-Length", "20000" if name == "large" else "200")
                self.end_headers()
                self.wfile.write(b"x" * 100)
            elif (files / name).is_file():
                self.send_response(200)
                self.end_headers()
                self.wfile.write((files / name).read_bytes())
            else:
                self.send_error(404)

        def log_message(self, *args) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        over.set()
        made.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def read(kind: str, file: str, **limits):
    turns = [{"role": "user", "content": [{"type": kind, kind: file}]}, {"role": "assistant", "content": "x"}]
    return files_of(Row(turns, "rows.jsonl", 1), Limits(**limits))[kind][0]


def test_files_come_from_where_rows_say(server: str) -> None:
    assert read("image", f"{server}/a.png", **FEW).size == (24, 16)
    assert read("image", f"{server}/here", **FEW).size == (24, 16)
    assert read("audio", f"{server}/a.wav", **FEW, sampling_rate=8000).shape == (4000,)
    assert len(read("video", f"{server}/a.gif", **FEW)) == 4


@pytest.mark.parametrize(
    "name, problem",
    [
        ("none.png", "the server answers 404 Not Found"),
        ("away", "an address of kind ftp; only http and https are fetched"),
        ("large", "it has more than 10,000 bytes"),
        ("endless", "it has more than 10,000 bytes"),
        ("short", "it ends after 100 of 200 bytes"),
        ("silent", "it did not arrive within 0.5 s"),
        ("dripping", "it did not arrive within 0.5 s"),
        ("broken.png", "not a readable image"),
    ],
)
def test_what_cannot_be_fetched_says_why(server: str, name: str, problem: str) -> None:
    with pytest.raises(Problem, match=problem) as error:
        read("image", f"{server}/{name}", **FEW)
    assert str(error.value).startswith(f"image 1 ({server}/{name}): ")


def test_only_addresses_of_the_web_are_fetched() -> None:
    for address in ("s3://bucket/a.png", "ftp://127.0.0.1/a.png"):
        with pytest.raises(Problem, match="only http and https are fetched"):
            read("image", address, **FEW)
    with pytest.raises(Problem, match="it cannot be fetched"):
        fetched("http://127.0.0.1:1/a.png", 10, 0.5)
    with pytest.raises(Problem, match="it cannot be fetched"):
        fetched("http://127.0.0.1:port/a.png", 10, 0.5)


def test_what_is_kept_is_fetched_once(tmp_path: Path) -> None:
    """So later epochs see what the check saw, whatever becomes of the server."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            if self.path == "/a.png":
                Image.new("RGB", (24, 16)).save(self.wfile, "PNG")

        def log_message(self, *args) -> None:
            pass

    limits = {**FEW, "remote_cache": tmp_path / "kept"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{made.server_address[1]}"
        assert read("image", f"{address}/a.png", **limits).size == (24, 16)
        for _ in range(2):  # what went wrong is asked for again
            with pytest.raises(Problem, match="404"):
                read("image", f"{address}/none.png", **limits)
        made.shutdown()
    assert read("image", f"{address}/a.png", **limits).size == (24, 16)
    assert asked == ["/a.png", "/none.png", "/none.png"]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem, match=r"it cannot be stored in .*file"):
        read("image", f"{address}/b.png", **{**limits, "remote_cache": tmp_path / "file"})


def test_nothing_is_fetched_unless_it_is_asked_for(server: str) -> None:
    assert not media_limits(SftConfig(), None).remote
    assert media_limits(SftConfig(allow_remote_media=True), None).remote
    with pytest.raises(Problem, match=r"not fetched: .* or allow it with --allow-remote-media"):
        read("image", f"{server}/a.png")


def test_rows_are_named_and_trained_on(server: str, tiny_models, tmp_path: Path, capsys) -> None:
    from shardproof.models.loading.processors import load_processor

    file = tmp_path / "rows.jsonl"
    rows = [
        {"query": "<image>which?", "response": "two", "images": [f"{server}/{name}"]} for name in ("a.png", "none.png")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(tiny_models("qwen2_5_omni"))
    encoder = MediaEncoder(load_processor(model), Limits(**FEW))
    with pytest.raises(DataError, match=r"rows.jsonl:2: image 1 \(http.*none.png\): the server answers 404"):
        encode_media_rows(read_rows([file]), encoder, max_length=512)
    encoded = encode_media_rows(read_rows([file]), encoder, max_length=512, bad_rows="skip")
    assert MediaCollator(encoder)([encoded[0]])["pixel_values"].shape[0] == 24
    show = ["data", "show", "--model", model, "--dataset", str(file), "--bad-rows", "skip", "--workers", "0"]
    assert main([*show, "--allow-remote-media"]) == 0
    said = capsys.readouterr().out
    assert "<|IMAGE|> x 6" in said
    assert f"{file}:2: image 1 ({server}/none.png): the server answers 404 Not Found" in said
    assert main(show) == 2
    assert "not fetched" in capsys.readouterr().err
