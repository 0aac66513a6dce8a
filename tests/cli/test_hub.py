"""Where a model comes from: a folder and a complete cache need no network, and a hub that is silent is left soon."""

from __future__ import annotations

import http.server
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from shardproof.cli import hub
from shardproof.errors import ConfigError
from shardproof.train.model.loading import check_model_source
from shardproof.train.options.config import SftConfig


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub at a port where nobody is."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


def store(cache: Path, model: str, *files: str) -> Path:
    repository = cache / ("models--" + model.replace("/", "--"))
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in files:
        (folder / name).write_text("{}")
    return folder


COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")


def test_a_complete_copy_in_the_cache_needs_no_network(cache: Path) -> None:
    store(cache, "org/name", *COMPLETE)
    assert not hub.needs_network("org/name")


@pytest.mark.parametrize("lacking", COMPLETE)
def test_a_copy_that_lacks_something_does(cache: Path, lacking: str) -> None:
    store(cache, "org/name", *(name for name in COMPLETE if name != lacking))
    with pytest.raises(ConfigError, match="no complete copy"):
        hub.needs_network("org/name")


def test_every_part_of_the_weights_must_be_there(cache: Path) -> None:
    parts = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    folder = store(cache, "org/name", "config.json", "tokenizer.json", parts[0])
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", parts, strict=True))})
    )
    assert not hub.in_cache("org/name")
    (folder / parts[1]).touch()
    assert hub.in_cache("org/name")


def test_a_hub_that_cannot_be_reached_is_named_with_where_was_looked(cache: Path) -> None:
    with pytest.raises(ConfigError) as error:
        hub.needs_network("org/name")
    text = str(error.value)
    assert all(part in text for part in ("org/name", str(cache), "http://127.0.0.1:9", "refused"))
    assert len(text.splitlines()) <= 3


def test_a_hub_that_never_answers_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="cannot be reached"):
            hub.needs_network("org/name")


def test_offline_by_the_users_own_setting_asks_nobody(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "silence_of", lambda url: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        hub.needs_network("org/name")


@pytest.fixture
def answering() -> Iterator[str]:
    """A server that answers, if only that it has nothing."""

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Nothing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_answers_is_asked_by_those_who_know_how(
    cache: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", answering)
    assert hub.needs_network("org/name")


@pytest.mark.parametrize("model", ["./x", "../x/y", "/x/y", "~/x", "a/b/c", "x/", "here/x", "a b", "C:\\models\\x"])
def test_what_looks_like_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ConfigError, match="There is no model folder"):
        check_model_source(model)


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "org_1/a.b-c"])
def test_what_may_be_an_id_is_left_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    check_model_source(model)


def test_a_revision_is_a_folder_of_the_cache(cache: Path) -> None:
    """So what comes after reads it as any other folder, and no option is left that says which."""
    folder = store(cache, "org/name", *COMPLETE)
    (cache / "models--org--name" / "refs" / "v1").write_text("abc")
    config = hub.placed(SftConfig(model="org/name", model_revision="v1"))
    assert (Path(config.model), config.model_revision) == (folder, None)
    assert hub.placed(SftConfig(model="org/name")).model == "org/name"


@pytest.mark.parametrize(
    "model, text",
    [("org/name", "v2: it is not in the cache .* cannot be reached"), ("tiny", "tiny is not one")],
)
def test_a_revision_that_is_nowhere_is_told(cache: Path, model: str, text: str) -> None:
    store(cache, "org/name", *COMPLETE)
    with pytest.raises(ConfigError, match=text):
        hub.placed(SftConfig(model=model, model_revision="v2"))


@pytest.fixture
def cached(cache: Path) -> str:
    """A small model in the cache, and the name that it has on the hub, which does not answer."""
    from shardproof.models.tiny import build_tiny

    folder = store(cache, "org/small")
    build_tiny(folder, ["what is this", "a small model"])
    return "org/small"


def test_a_model_of_the_hub_is_asked_and_exported_by_its_name(cached: str, tmp_path: Path, monkeypatch, capfd) -> None:
    from shardproof.cli.main import main

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["infer", cached, "--prompt", "what is this", "--max-new-tokens", "3"]) == 0
    Path("rows.jsonl").write_text(json.dumps({"query": "what is this"}) + "\n")
    assert main(["infer", cached, "--dataset", "rows.jsonl", "--max-new-tokens", "3"]) == 0
    (answers,) = Path("answers").glob("*.jsonl")
    assert len(answers.read_text().splitlines()) == 1
    assert main(["export", cached, "out", "--dtype", "bf16"]) == 0
    assert (tmp_path / "here" / "out" / "model.safetensors").is_file()


def test_what_is_named_is_a_folder_where_it_could_be_one(cached: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.run_or_model(cached) == str(tmp_path / "hub" / "models--org--small" / "snapshots" / "abc")
    for name in ("run", "/no/where", "a/b/c", "runs/one"):
        Path("runs").mkdir(exist_ok=True)
        assert hub.run_or_model(name) == name
    with pytest.raises(
        ConfigError, match=r"There is no folder org/none, no complete copy of it in the cache"
    ) as caught:
        hub.run_or_model("org/none")
    assert str(caught.value).endswith("Name a folder with config.json and weights."), "'tiny' has nothing to say"
    Path("org").mkdir()
    assert hub.run_or_model(cached) == cached


def test_adapters_in_the_cache_are_found(cache: Path) -> None:
    """Their folder has no model, which lies elsewhere."""
    folder = store(cache, "org/adapters", "adapter_config.json")
    with pytest.raises(ConfigError, match="no complete copy of it"):
        hub.run_or_model("org/adapters")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    assert hub.run_or_model("org/adapters") == str(folder)
    (folder / "adapter_model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(ConfigError, match="no complete copy of it"):
        hub.run_or_model("org/adapters")
