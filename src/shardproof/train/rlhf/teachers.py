"""Checks of a teacher before models are loaded, and a vLLM server as the teacher."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from itertools import islice
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.model.declared import declared
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.rlhf_config import RlhfConfig, draws_answers

log = logging.getLogger("shardproof")

OPTION = "--teacher-model-server"
PROBED = 64  # tokens from across the vocabulary whose texts are compared
# Seconds until a response must be complete: to the first request, and to the rows of a micro-batch.
ONCE, WORK = 30.0, 1800.0
PAUSES = (1.0, 4.0)  # seconds before a failed request is repeated
LATER = (408, 429)  # and all from 500: the server may respond later
UNKNOWN = "\ufffd"  # in the text of a token that is only a part of a character

Entries = list[dict[int, float]]  # log-probabilities by token, for each token after the first


def check_topk(config: RlhfConfig) -> None:
    """Raise ConfigError if --gkd-logits-topk exceeds the vocabulary of the teacher or the student."""
    for name in ("model", "teacher_model"):
        source = getattr(config, name)
        known = declared(config.model_copy(update={"model": source})) if source and config.gkd_logits_topk else None
        tokens = getattr(known and known.get_text_config(), "vocab_size", None)
        if tokens and config.gkd_logits_topk > tokens:  # type: ignore[operator]  # not None here
            raise ConfigError(
                f"--gkd-logits-topk {config.gkd_logits_topk}: {source} has only {tokens} tokens. Leave it out to"
                f" compare all of them."
            )


def check_served(config: RlhfConfig) -> None:
    """Raise ConfigError for options that do not work with a teacher on a server, or that it needs."""
    if config.teacher_model_server is None:
        return
    said = f"{OPTION} {config.teacher_model_server}"
    if config.teacher_model:
        raise ConfigError(f"{said} and --teacher-model: only one teacher can be used. Leave one of them out.")
    if not config.teacher_model_server.startswith(("http://", "https://")):
        raise ConfigError(f"{said}: must be the address of one server, such as http://localhost:8000.")
    if config.rlhf_type == "gkd" and not config.gkd_logits_topk:
        raise ConfigError(
            f"{said} returns only its likeliest tokens, not the full distribution: add --gkd-logits-topk 64."
        )
    if config.seq_kd:
        raise ConfigError(
            f"{said} and --seq-kd: a server scores tokens but does not generate answers. Leave one of them out."
        )
    if config.rlhf_type == "grpo" and config.temperature != 1:
        raise ConfigError(
            f"{said} returns probabilities at temperature 1, but answers are sampled and compared at --temperature"
            f" {config.temperature:g}. Use --temperature 1, or --teacher-model."
        )


def check_teacher_server(config: RlhfConfig, processing: Any, report: Any) -> None:
    """Send one request to the teacher's server before models are loaded. `report`: the `PairReport` of the rows.

    Raises:
        ConfigError: it cannot be reached, returns too few log-probabilities, has another tokenizer, or rows are too
            long for it.
    """
    if config.teacher_model_server is None:
        return
    server = TeacherServer(config.teacher_model_server, config.gkd_logits_topk or 0)
    written = config.max_completion_length if draws_answers(config) else 0
    longest = min(report.longest_kept, config.max_length) + written
    if server.room is not None and longest >= server.room:
        raise ConfigError(
            f"{OPTION} {server.address} takes rows of fewer than {server.room} tokens, and these have up to {longest}"
            f"{f', {written} of them answers' if written else ''}. Start it with --max-model-len {longest + 1}, or"
            " set --max-length and --max-completion-length."
        )
    tokenizer = tokenizer_of(processing)
    ids = [*range(0, len(tokenizer), max(1, len(tokenizer) // PROBED))][: min(PROBED, (server.room or PROBED) - 1)]
    server.asked([ids], ONCE)
    for token, text in server.texts.items():
        ours = tokenizer.decode([token]) if token < len(tokenizer) else None
        if ours is not None and ours != text and UNKNOWN not in ours + text:
            raise ConfigError(
                f"{OPTION} {server.address}: token {token} is {text!r} in {server.model}, and {ours!r} in"
                f" {config.model}. The teacher gets the tokens of the model: use one with the same tokenizer."
            )


class TeacherServer:
    """A vLLM server that returns the probabilities its model gives to tokens (`prompt_logprobs`, in OpenAI's format).

    Args:
        address: the address of the server, without a path.
        topk: how many of the likeliest tokens to ask for; 0: only for the tokens of the row.

    Attributes:
        model: the server's name for its model.
        room: the maximum length that it accepts, if it says so.
        texts: the texts of tokens in the last response, as far as given.

    Raises:
        ConfigError: by each request, if the response is not vLLM's; the message contains what the server said.
    """

    def __init__(self, address: str, topk: int) -> None:
        self.address, self.topk, self.texts = address.rstrip("/").removesuffix("/v1"), topk, dict[int, str]()
        self._told_beyond = False
        told = self._answer("/v1/models", None, ONCE)
        try:
            self.model, self.room = str(told["data"][0]["id"]), told["data"][0].get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._other("/v1/models", told) from None

    def likeliest(self, ids: Any, mask: Any, learnt: Any, among: int) -> tuple[Any, Any]:
        """The likeliest tokens at each learned position, with their log-probabilities.

        Args:
            ids, mask: those of rows (B, T), padded at either end.
            learnt: whether the token after a position is learned (B, T - 1).
            among: the vocabulary size of the student; see `losses.likeliest`.

        Returns: log-probabilities [positions, topk] in float32, and tokens [positions, topk], in the order of `learnt`;
            `ABSENT` for tokens that the student does not have.
        """
        import torch

        from shardproof.train.losses.likeliest import ABSENT

        best = []
        for entry in self._of(ids, mask, learnt):
            likely = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: self.topk]
            known = [(token, odds) for token, odds in likely if token < among]
            if len(known) < len(likely):
                self._tell_beyond(max(entry), among)
            taken = {token for token, _ in known}
            others = (token for token in range(among) if token not in taken)
            best.append([*known, *((token, ABSENT) for token in islice(others, self.topk - len(known)))])
        values = torch.tensor([[odds for _, odds in entry] for entry in best], dtype=torch.float32)
        tokens = torch.tensor([[token for token, _ in entry] for entry in best], dtype=torch.long)
        return (part.view(-1, self.topk).to(ids.device) for part in (values, tokens))  # type: ignore[return-value]

    def _tell_beyond(self, token: int, among: int) -> None:
        if not self._told_beyond:
            log.warning(
                "%s %s has token %d among its likeliest ones, and --model has %d tokens: those beyond are left out,"
                " and only the rest are compared.",
                OPTION,
                self.address,
                token,
                among,
            )
        self._told_beyond = True

    def logps(self, ids: Any, mask: Any, keep: int) -> Any:
        """Log-probabilities of the last `keep` tokens of rows (B, T), in float32; 0 for padding."""
        import torch

        behind = mask[:, 1:].bool().clone()
        behind[:, : behind.shape[1] - keep] = False
        given = ids[:, 1:][behind].tolist()
        found = [entry[token] for entry, token in zip(self._of(ids, mask, behind), given, strict=True)]
        logps = torch.zeros(behind.shape, device=ids.device)
        logps[behind] = torch.tensor(found, device=ids.device)
        return logps[:, behind.shape[1] - keep :]

    def _of(self, ids: Any, mask: Any, wanted: Any) -> Entries:
        """The entries for the tokens after the positions that are `wanted` (B, T - 1), row by row."""
        real = mask.bool()
        asked = [b for b in range(len(ids)) if wanted[b].any()]
        found = self.asked([ids[b][real[b]].tolist() for b in asked], WORK) if asked else []
        entries: Entries = []
        for b, of_row in zip(asked, found, strict=True):
            places = (real[b].cumsum(0) - 2)[1:][wanted[b]]  # positions counted from the second token of the row
            entries += [of_row[place] for place in places.tolist()]
        return entries

    def asked(self, rows: list[list[int]], seconds: float) -> list[Entries]:
        """The server's response for rows of tokens: for each token after the first, the log-probabilities of this token
        and of the likeliest ones."""
        question = {
            "model": self.model,
            "prompt": rows,
            "prompt_logprobs": self.topk,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        path = "/v1/completions"
        told = self._answer(path, question, seconds)
        try:
            choices = sorted(told["choices"], key=lambda choice: choice["index"])
            found = [choice["prompt_logprobs"][1:] for choice in choices]
            self.texts = {
                int(token): value["decoded_token"]
                for of_row in found
                for entry in of_row
                for token, value in entry.items()
                if value.get("decoded_token") is not None
            }
            entries = [[{int(t): float(v["logprob"]) for t, v in entry.items()} for entry in of] for of in found]
            if not all(math.isfinite(odds) for of in entries for entry in of for odds in entry.values()):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._other(path, told) from None
        self._check(rows, entries)
        return entries

    def _check(self, rows: list[list[int]], entries: list[Entries]) -> None:
        """Raise ConfigError for a response about other tokens, or with fewer of the likeliest ones."""
        if [len(row) - 1 for row in rows] != [len(of_row) for of_row in entries]:
            told = [len(of_row) + 1 for of_row in entries]
            raise ConfigError(
                f"{OPTION} {self.address} got {len(rows)} row(s) of {[len(row) for row in rows]} tokens, but"
                f" answered for {told}. It must accept token ids unchanged, as vllm serve MODEL does."
            )
        for row, of_row in zip(rows, entries, strict=True):
            for token, entry in zip(row[1:], of_row, strict=True):
                if token not in entry:
                    raise ConfigError(
                        f"{OPTION} {self.address} returns no log-probability for token {token}, which was in the"
                        f" request. It must accept token ids unchanged, as vllm serve MODEL does."
                    )
                if len(entry) < self.topk:
                    raise ConfigError(
                        f"{OPTION} {self.address} returns {len(entry)} log-probabilities per token, but"
                        f" --gkd-logits-topk is {self.topk}.\n{self._more()}"
                    )

    def _more(self) -> str:
        return f"Start it with --max-logprobs {self.topk}, or ask for fewer."

    def _other(self, path: str, told: Any) -> ConfigError:
        return ConfigError(
            f"{OPTION} {self.address}{path} does not respond like vLLM, but with {json.dumps(told)[:200]}.\n"
            f"Start one with: {start(self.topk)}"
        )

    def _answer(self, path: str, question: Any, seconds: float) -> Any:
        """The server's response; the request is repeated if there is none."""
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.address}{path}", body, {"Content-Type": "application/json"})
        problem = ""
        for pause in (*PAUSES, None):
            try:
                said, refusal = _said(request, seconds)
                if refusal is None:
                    with contextlib.suppress(ValueError):
                        return json.loads(said)
                    problem = f"but {said[:200]!r}"
                elif refusal.code < 500 and refusal.code not in LATER:
                    raise self._refused(path, refusal, said)
                else:
                    problem = f"{refusal.code} {refusal.reason}: {said}".strip()
            except (OSError, http.client.HTTPException) as error:  # no server, or a broken connection
                reason = getattr(error, "reason", None) or error
                problem = str(reason) or type(error).__name__
                if isinstance(reason, TimeoutError):  # another attempt would take as long
                    problem = f"{problem} after {seconds:g} s"
                    break
            if pause is not None and seconds != ONCE:
                time.sleep(pause)
        raise ConfigError(f"{OPTION}: no answer from {self.address} ({problem}).\nStart one with: {start(self.topk)}")

    def _refused(self, path: str, error: urllib.error.HTTPError, said: str) -> ConfigError:
        try:
            told = json.loads(said)
            said = str((told.get("error") or told)["message"])
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        if error.code in (401, 403):
            what = "Requests have no key: start it without --api-key."
        elif moved := error.headers.get("Location"):
            what = f"It has moved to {moved}: give that address, without the path."
        elif "logprobs" in said and self.topk:
            what = self._more()
        else:
            what = "The request had tokens of the model's rows."
        return ConfigError(f"{OPTION} {self.address}{path} answers {error.code}: {said or error.reason}\n{what}")


def _said(request: urllib.request.Request, seconds: float) -> tuple[str, urllib.error.HTTPError | None]:
    """The response, and the HTTP error if it is one, complete within `seconds`: a socket timeout starts again with
    every byte."""
    answer = Future[tuple[str, urllib.error.HTTPError | None]]()

    def ask() -> None:
        try:
            answer.set_result(_read(request, seconds))
        except BaseException as error:  # the caller's
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # a late one is left alone, since the run ends
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError("timed out") from None


def _read(request: urllib.request.Request, seconds: float) -> tuple[str, urllib.error.HTTPError | None]:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as told:
            return told.read().decode(errors="replace"), None
    except urllib.error.HTTPError as error:
        with error:
            return error.read(2000).decode(errors="replace"), error


def start(topk: int) -> str:
    """The command that starts a server with this limit."""
    return f"vllm serve MODEL{f' --max-logprobs {topk}' if topk else ''}"
