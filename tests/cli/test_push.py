"""Promise: what is exported goes to a hub file by file, in the place of an older model, and a token that is missing or
may not write is told before the export begins; it is never printed."""

from __future__ import annotations

import base64
import http.server
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from shardproof.cli import export, push, swift
from shardproof.errors import ConfigError
from shardproof.models.tiny import build_tiny

TOKENS: dict[str, dict[str, Any]] = {
    "hf_writes": {"role": "write"},
    "hf_reads": {"role": "read"},
    "hf_of_this": {
        "role": "fineGrained",
        "fineGrained": {
            "scoped": [{"entity": {"name": "me/mine"}, "permissions": ["repo.content.read", "repo.write"]}]
        },
    },
    "hf_of_another": {
        "role": "fineGrained",
        "fineGrained": {"scoped": [{"entity": {"name": "me/other"}, "permissions": ["repo.write"]}]},
    },
}


class Hub(http.server.ThreadingHTTPServer):
    """The routes that an upload takes. `repos` has, by name, whether a repository is private, and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repos: dict[str, tuple[bool, dict[str, bytes]]] = {}
        self.stored: dict[str, bytes] = {}
        self.full = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None: ...

    def _say(self, said: Any, status: int = 200, error: str = "") -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        if status == 403:
            self.send_header("X-Error-Message", said["error"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_HEAD(self) -> None:
        self._say({})

    def do_GET(self) -> None:
        token = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            orgs = [{"name": "ours", "roleInOrg": "write"}, {"name": "theirs", "roleInOrg": "read"}]
            found = {"name": "me", "orgs": orgs, "auth": {"accessToken": token}}
            self._say(found, 200) if token else self._say({"error": "no"}, 401)
            return
        name = path.removeprefix("/api/models/").partition("/tree/")[0]
        if name not in self.server.repos:
            self._say({"error": "not found"}, 404, "RepoNotFound")
            return
        private, files = self.server.repos[name]
        tree = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files.items()]
        self._say(tree if "/tree/" in path else {"id": name, "private": private})

    def do_POST(self) -> None:
        body = self._body()
        if self.server.full:
            self._say({"error": "there is no room"}, 403)
        elif self.path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said.get('organization') or 'me'}/{said['name']}"
            there = name in self.server.repos
            self.server.repos.setdefault(name, (said.get("visibility") == "private", {}))
            self._say({"url": f"{self.server.url}/{name}"}, 409 if there else 200)
        elif "/preupload/" in self.path:
            modes = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            found = [
                {"path": p, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False} for p, large in modes
            ]
            self._say({"files": found})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            found = [{**one, "actions": {"upload": {"href": f"{self.server.url}/{one['oid']}"}}} for one in wanted]
            self._say({"transfer": "basic", "objects": found})
        else:
            self._commit(self.path.removeprefix("/api/models/").partition("/commit/")[0], body)

    def _commit(self, name: str, body: bytes) -> None:
        files = self.server.repos[name][1]
        for line in body.splitlines():
            key, value = (json.loads(line)[part] for part in ("key", "value"))
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        self._say({"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def do_PUT(self) -> None:
        self.server.stored[self.path[1:]] = self._body()
        self._say({})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a user whose token may write."""
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # of a server of its own
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").write_text('{"mean": true}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_is_in_the_folder_is_on_the_hub(hub: Hub, model: Path) -> None:
    assert push.target("me/mine", True, None).push(model) == f"{hub.url}/me/mine"
    assert hub.repos == {"me/mine": (True, files_of(model))}


def test_the_weights_of_an_older_model_are_not_taken_for_these(hub: Hub, model: Path) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"1",
        "model.safetensors.index.json": b"{}",
        "adapter_config.json": b"{}",
    }
    others = {"README.md": b"# mine", "onnx/model.bin": b"2"}
    hub.repos["ours/mine"] = (False, {**old, **others})
    push.target("ours/mine", False, "hf_writes").push(model)
    assert hub.repos["ours/mine"][1] == {**others, **files_of(model)}


@pytest.mark.parametrize(
    ("token", "name", "told"),
    [
        (None, "me/mine", r"there is no token. Set HF_TOKEN, or log in with 'hf auth login'; .*/settings/tokens\."),
        ("hf_unknown", "me/mine", "the hub does not take this token: Invalid user token"),
        ("hf_reads", "me/mine", "the token may read but not write"),
        ("hf_of_another", "me/mine", "the token may read but not write"),
        ("hf_writes", "them/mine", "the token belongs to me, who is a member of ours, theirs, not to them"),
        ("hf_writes", "theirs/mine", "me may read but not write the repositories of theirs"),
        ("hf_writes", "mine", "a repository is named OWNER/NAME"),
    ],
)
def test_a_token_that_may_not_write_is_told_before_the_export(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None, name: str, told: str
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    given = ["--hub-token", token] if token else []
    with pytest.raises(ConfigError, match=rf"^--push-to-hub {name}: {told}") as refused:
        export.run(["no run", str(tmp_path / "out"), "--push-to-hub", name, *given])
    assert not hub.repos
    assert token is None or token not in str(refused.value)


def test_a_token_of_one_repository_may_write_there(hub: Hub, model: Path) -> None:
    push.target("Me/mine", False, "hf_of_this").push(model)


def test_what_others_see_already_is_not_private(hub: Hub) -> None:
    hub.repos["me/mine"] = (False, {})
    with pytest.raises(ConfigError, match=r"--private: it already exists and is public. Make it private on"):
        push.target("me/mine", True, None)
    hub.repos["me/mine"] = (True, {})
    push.target("me/mine", True, None)


def test_a_hub_that_takes_nothing_leaves_the_folder(hub: Hub, model: Path) -> None:
    goal = push.target("me/mine", False, None)
    hub.full = True
    with pytest.raises(
        ConfigError, match=r"was written, but could not be pushed to me/mine: .+\n.*: hf upload me/mine /"
    ) as no:
        goal.push(model)
    assert "there is no room" in str(no.value)
    assert (model / "model.safetensors").is_file()


def test_a_hub_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConfigError, match=r"the hub http://127.0.0.1:9 cannot be reached"):
        push.target("me/mine", False, None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids asking a hub"):
        push.target("me/mine", False, None)


@pytest.mark.slow
def test_what_the_command_writes_is_pushed(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, out = build_tiny(tmp_path / "tiny", ["the shard holds a rank"]), tmp_path / "out"
    argv = [str(source), str(out), "--push-to-hub", "me/mine", "--hub-token", "hf_of_this", "--private"]
    assert export.run(argv) == 0
    assert hub.repos == {"me/mine": (True, files_of(out))}
    said = "".join(capfd.readouterr())
    assert f"pushed: {hub.url}/me/mine" in said
    assert "hf_" not in said


@pytest.mark.parametrize("option", [["--private"], ["--hub-token", "hf_writes"]])
def test_options_of_a_hub_alone_are_refused(option: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"^{option[0]} needs --push-to-hub OWNER/NAME"):
        export.run(["RUN", "FOLDER", *option])


def test_modelscope_is_asked_by_its_own_client(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which no real upload was tried."""
    said: list[Any] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            said.append(token)

        def whoami(self) -> None:
            if said[-1] == "ms-unknown":
                raise RuntimeError("token is invalid")

        def repo_exists(self, name: str, kind: str) -> bool:
            return False

        def create_repo(self, name: str, kind: str, visibility: str) -> None:
            said.append((name, kind, visibility))

        def upload_folder(self, name: str, kind: str, folder: Path, commit_message: str) -> None:
            said.append((name, kind, folder))

    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setattr("modelscope_hub.HubApi", Api)
    assert push.target("MS::me/mine", True, "ms-1").push(model) == f"{hub.url}/models/me/mine"
    assert said == ["ms-1", ("me/mine", "model", "private"), ("me/mine", "model", model)]
    with pytest.raises(ConfigError, match=r"MS::me/mine: the hub does not take this token .*: token is invalid"):
        push.target("MS::me/mine", False, "ms-unknown")


def test_commands_of_ms_swift_push_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Their token is not printed."""
    named = "--push_to_hub true --hub_model_id me/mine --hub_private_repo true --hub_token hf_writes"
    command, notes, missing = swift.translate(f"swift export --adapters run --merge_lora true {named}")
    assert command == "shardproof export run run-merged --private true --push-to-hub MS::me/mine"
    assert "--hub-token is left out: set HF_TOKEN, which does not show up in process lists" in notes
    assert not missing
    command, notes, missing = swift.translate("swift export --model m --push_to_hub false --hub_model_id me/mine")
    assert command == "shardproof export m m-merged"
    assert not missing
    *_, missing = swift.translate("swift export --model m --push_to_hub true")
    assert missing == ["--push-to-hub true needs --hub-model-id OWNER/NAME."]
    command, notes, (reason,) = swift.translate(
        "swift sft --model m --dataset d --push_to_hub true --hub_token hf_writes"
    )
    assert "shardproof export runs/RUN FOLDER --push-to-hub OWNER/NAME" in reason
    assert "hf_writes" not in "".join([command, *notes, reason])
