"""A server that answers as vLLM does about the tokens of prompts, with a model of transformers behind it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Teacher(ThreadingHTTPServer):
    """Attributes:
    asked: the questions so far.
    most: log-probabilities that it gives at most (vLLM's --max-logprobs).
    room: tokens that it takes at once.
    failing: how many further questions it breaks off.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked: list[dict[str, Any]] = []
        self.most, self.room, self.failing, self.silent_of = 20, 512, 0, -1
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def judged(self, question: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        rows, k = question["prompt"], question["prompt_logprobs"]
        if k > self.most:
            said = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most}"
            return 400, {"error": {"message": said, "type": "BadRequestError", "code": 400}}
        if max(token for row in rows for token in row) >= self.model.config.vocab_size:
            return 400, {"error": {"message": "Token id is out of vocabulary", "code": 400}}
        choices = [{"index": i, "prompt_logprobs": self._of_row(row, k)} for i, row in enumerate(rows)]
        return 200, {"object": "text_completion", "choices": choices[::-1]}

    def _of_row(self, row: list[int], k: int) -> list[Any]:
        import torch

        with self.lock:
            odds = self.model(torch.tensor([row])).logits[0].float().log_softmax(-1)
        found: list[Any] = [None]
        for token, of_token in zip(row[1:], odds, strict=False):
            best = {*of_token.topk(k).indices.tolist(), token}
            found.append({str(t): self._entry(t, of_token) for t in best if t != self.silent_of})
        return found

    def _entry(self, token: int, odds: Any) -> dict[str, Any]:
        rank = int((odds > odds[token]).sum()) + 1
        return {"logprob": float(odds[token]), "rank": rank, "decoded_token": self.tokenizer.decode([token])}


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        told = {"object": "list", "data": [{"id": "teacher", "max_model_len": self.server.room}]}
        self._tell(*((200, told) if known else (404, {"detail": "Not Found"})))

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.failing:
            self.server.failing -= 1
            self.connection.close()
            return
        self.server.asked.append(question)
        self._tell(*self.server.judged(question))

    def _tell(self, code: int, content: dict[str, Any] | str) -> None:
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Teacher]:
    """A server of the model in this folder, on a port of its own."""
    with Teacher(folder) as teacher:
        threading.Thread(target=teacher.serve_forever, daemon=True).start()
        try:
            yield teacher
        finally:
            teacher.shutdown()
