"""Promise: a teacher on a server teaches what the same teacher does in the processes that train, or says why not."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.pool import RemoteError
from shardproof.errors import ConfigError
from shardproof.train.losses.likeliest import distance
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf import teachers
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.teachers import TeacherServer, check_teacher_server
from train.rlhf.teacher_of_transformers import Teacher, served
from train.rlhf.test_likeliest import divergence
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, SHARED

GKD = [*COMMON, "--dataset", "FILES/chats.jsonl", "--rlhf-type", "gkd", "--gkd-logits-topk", "8"]
GRPO = [*COMMON, *ALGORITHMS["grpo"]]
LOCAL = ["--teacher-model", "MODELS/other"]


@pytest.fixture(scope="module")
def other(models: dict[str, Path]) -> Iterator[Teacher]:
    with served(models["other"]) as teacher:
        yield teacher


@pytest.fixture
def teacher(other: Teacher) -> Iterator[Teacher]:
    before = vars(other).copy()
    other.asked.clear()
    yield other
    vars(other).update(before)


def compare(rlhf: Any, options: list[str], teacher: Teacher, names: tuple[str, ...], ways: Any, **shape: Any) -> None:
    """Of one process with the teacher in it, and two that ask the server."""
    one = {"stage": 0, "per_device_batch_size": 2, "gradient_accumulation_steps": 2, **shape}
    (known,) = rlhf(1, [one], *options, *LOCAL)
    many = [{"per_device_batch_size": 2, **way, **shape} for way in ways]
    for found in rlhf(2, many, *options, "--teacher-model-server", teacher.address):
        for name in names:
            mine, its = ([r[name] for r in records if name in r] for records in (found, known))
            assert mine == pytest.approx(its, rel=2e-4, abs=1e-5), name
            assert its


def test_gkd_learns_the_same(rlhf: Any, teacher: Teacher) -> None:
    compare(rlhf, GKD, teacher, ("loss", "grad_norm"), [{"stage": 3}], lmbda=0.0, max_steps=2)
    assert {question["prompt_logprobs"] for question in teacher.asked} == {8}


@pytest.mark.slow
def test_so_it_does_in_variants(rlhf: Any, teacher: Teacher) -> None:
    more: dict[str, Any] = {"lmbda": 0.0, "sft_alpha": 0.3, "val_split": 0.2, "max_length": 24, "truncation": "left"}
    compare(rlhf, GKD, teacher, ("loss", "grad_norm", "eval_loss"), [*CHECKPOINTED, {"stage": 1}], **more)
    of_student = {"lmbda": 1.0, "temperature": 1e-4, "max_completion_length": 6, "max_steps": 1, "stage": 2}
    shape = {
        **of_student,
        "per_device_batch_size": 2,
    }  # of answers that are written a micro-batch has a mean of its own
    ((known, *_),), ((found, *_),) = (
        rlhf(2, [shape], *GKD, *taught) for taught in (LOCAL, ["--teacher-model-server", teacher.address])
    )
    assert found["loss"] == pytest.approx(known["loss"], rel=1e-4)


@pytest.mark.slow
def test_grpo_is_told_of_its_own_tokens(rlhf: Any, teacher: Teacher) -> None:
    names = ("loss", "grad_norm", "teacher_kl")
    ways = [{"stage": 3}, CHECKPOINTED[1], {"stage": 2, **SHARED}]
    compare(rlhf, GRPO, teacher, names, ways, num_generations=1, reward_funcs=[], temperature=1.0)
    assert {question["prompt_logprobs"] for question in teacher.asked} == {0}


def test_what_it_says_is_put_where_it_belongs(teacher: Teacher) -> None:
    """Of rows that are padded at either end."""
    ids = torch.randint(300, 900, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :3] = mask[1, 7:] = 0
    odds = teacher.model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    odds = odds[:, :-1].log_softmax(-1)
    learnt = mask[:, 1:].bool() & mask[:, :-1].bool()
    learnt[:, :4] = False
    learnt[2] = False  # a row of which nothing is learnt is not asked about
    values, tokens = TeacherServer(teacher.address, 5).likeliest(ids, mask, learnt, 2048)
    expected = odds[learnt].topk(5)
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(values, expected.values, atol=1e-5)
    assert len(teacher.asked[-1]["prompt"]) == 2
    mask[1, 7:] = 1
    known = odds.gather(2, ids[:, 1:, None])[..., 0][:, -4:]
    logps = TeacherServer(teacher.address, 0).logps(ids, mask, 4)
    assert torch.allclose(logps[[0, 2]], known[[0, 2]], atol=1e-5)
    none = TeacherServer(teacher.address, 5).likeliest(ids, mask, torch.zeros_like(learnt), 2048)
    assert [tuple(part.shape) for part in none] == [(0, 5), (0, 5)]


def test_what_lies_beyond_the_vocabulary_of_the_model_is_left_out(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both distributions are those of the rest, and no token of the model learns from a place that is empty."""
    likely = {7: -0.5, 2048: -1.0, 3: -2.0, 9000: -3.0}
    entry = {str(token): {"logprob": odds} for token, odds in {**likely, 31: -9.0}.items()}
    monkeypatch.setattr(
        teacher, "judged", lambda question: (200, {"choices": [{"index": 0, "prompt_logprobs": [None, entry]}]})
    )
    server, ids = TeacherServer(teacher.address, 4), torch.tensor([[30, 31]])
    given = ids, torch.ones_like(ids), torch.tensor([[True]]), 2048
    with caplog.at_level("WARNING", logger="shardproof"):
        taught, again = (tuple(server.likeliest(*given)) for _ in range(2))
    assert [part.shape for part in taught] == [(1, 4), (1, 4)]
    assert all(torch.equal(part, other) for part, other in zip(taught, again, strict=True))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, "once a run"
    assert "token 9000 among its likeliest ones, and --model has 2048 tokens" in said[0]
    few = torch.tensor([[-0.5, -2.0]]), torch.tensor([[7, 3]])
    for beta in (0.0, 0.5, 1.0):
        found = []
        for part in (taught, few):
            head = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            loss = distance(torch.ones(1, 8), head, None, part, 1, divergence(beta))
            loss.backward()
            found.append((loss.detach(), head.grad))
        assert torch.isfinite(found[0][0])
        torch.testing.assert_close(found[0], found[1])


def looked_at(teacher: Teacher, models: dict[str, Path], topk: int = 8, longest: int = 100, **more: Any) -> None:
    from transformers import AutoTokenizer

    given = {"rlhf_type": "gkd", "lmbda": 0.0, "model": str(models["policy"]), "teacher_model_server": teacher.address}
    config = RlhfConfig(**{**given, "gkd_logits_topk": topk, **more})
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    check_teacher_server(config, tokenizer, SimpleNamespace(longest_kept=longest))


def test_one_that_is_away_or_another_is_told_before_anything_is_loaded(
    teacher: Teacher, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at(teacher, models)
    with pytest.raises(ConfigError, match=r"no answer from http://127.0.0.1:9 \(.*refused\)[^\n]*\n.*--max-logprobs 8"):
        looked_at(teacher, models, teacher_model_server="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"max allowed: 20\nStart it with --max-logprobs 64, or ask for fewer"):
        looked_at(teacher, models, topk=64)
    with pytest.raises(
        ConfigError,
        match=r"takes rows of fewer than 512 tokens, .* up to 612, 512 of them answers. .* --max-model-len 613",
    ):
        looked_at(teacher, models, lmbda=1.0, max_completion_length=512)
    with pytest.raises(ConfigError, match=r"answers 404: .*Not Found"):
        looked_at(teacher, models, teacher_model_server=f"{teacher.address}/other")
    words = teacher.tokenizer
    monkeypatch.setattr(teacher, "tokenizer", SimpleNamespace(decode=lambda ids: words.decode([ids[0] + 1])))
    with pytest.raises(ConfigError, match=r"is '.*' in teacher, and '.*' in .*policy. The teacher gets the tokens of"):
        looked_at(teacher, models)
    monkeypatch.undo()
    teacher.silent_of = 31
    with pytest.raises(ConfigError, match="returns no log-probability for token 31"):
        TeacherServer(teacher.address, 2).asked([[30, 31, 32]], 10)
    teacher.silent_of, few = -1, teacher.judged
    monkeypatch.setattr(teacher, "judged", lambda question: few({**question, "prompt_logprobs": 1}))
    with pytest.raises(ConfigError, match=r"returns [12] log-probabilities per token, but --gkd-logits-topk is 4"):
        TeacherServer(teacher.address, 4).asked([[30, 31, 32]], 10)
    monkeypatch.setattr(teacher, "judged", lambda question: (200, {"choices": []}))
    with pytest.raises(ConfigError, match=r"got 1 row\(s\) of \[3\] tokens, but answered for \[\]"):
        TeacherServer(teacher.address, 0).asked([[30, 31, 32]], 10)
    monkeypatch.setattr(teacher, "judged", lambda question: (200, {"choices": [{"index": 0}]}))
    with pytest.raises(ConfigError, match="does not respond like vLLM, but with"):
        TeacherServer(teacher.address, 0).asked([[30, 31, 32]], 10)


def test_a_line_that_breaks_is_asked_again(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "PAUSES", (0.0, 0.0))
    teacher.failing = 2
    TeacherServer(teacher.address, 2).asked([[30, 31, 32]], 20)
    teacher.failing = 3
    with pytest.raises(ConfigError, match="no answer from"):
        TeacherServer(teacher.address, 2).asked([[30, 31, 32]], 20)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((401, {"error": "Unauthorized"}), r"answers 401: .*Unauthorized.*\nRequests have no key"),
        ((429, {"error": {"message": "wait"}}), r"no answer from .* \(429 Too Many Requests: .*wait"),
        ((200, "<html>"), r"no answer from .* \(but '<html>'\)"),
        ((200, {"choices": [{"index": 0, "prompt_logprobs": [None, {"31": {"logprob": math.nan}}]}]}), "but with {"),
    ],
    ids=["a key", "too many", "a page", "no number"],
)
def test_what_no_teacher_answers_is_told_as_that(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any], text: str
) -> None:
    monkeypatch.setattr(teachers, "PAUSES", (0.0, 0.0))
    server = TeacherServer(teacher.address, 0)
    monkeypatch.setattr(teacher, "judged", lambda question: answer)
    with pytest.raises(ConfigError, match=text):
        server.asked([[30, 31]], 20)


@pytest.mark.parametrize("where", ["headers", "body", "body of an error"])
def test_an_answer_that_drips_is_late(teacher: Teacher, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A byte now and then is no answer: all of it has the time that is told."""
    server, gone = TeacherServer(teacher.address, 2), threading.Event()

    def drip(handler: Any, *_: Any) -> None:
        if where != "headers":
            handler.send_response(200 if where == "body" else 400)
            handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: " if where == "headers" else b" ")
            while not gone.wait(0.02):
                handler.wfile.write(b" ")

    monkeypatch.setattr(teacher.RequestHandlerClass, "_tell", drip)
    try:
        with pytest.raises(ConfigError, match=r"no answer from .* \(timed out after 0.5 s\)"):
            server.asked([[30, 31]], 0.5)
    finally:
        gone.set()
    assert len(teacher.asked) == 1


def test_a_line_that_breaks_in_a_refusal_is_told(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TeacherServer(teacher.address, 2)
    monkeypatch.setattr(teachers, "PAUSES", ())

    def cut(handler: Any, *_: Any) -> None:
        handler.send_response(500)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        handler.connection.close()

    monkeypatch.setattr(teacher.RequestHandlerClass, "_tell", cut)
    with pytest.raises(ConfigError, match="no answer from"):
        server.asked([[30, 31]], 20)


def test_one_that_is_late_is_not_asked_again(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TeacherServer(teacher.address, 2)
    monkeypatch.setattr(teacher, "judged", lambda question: (200, time.sleep(0.5)))
    with pytest.raises(ConfigError, match=r"no answer from .* \(timed out after 0.1 s\)"):
        server.asked([[30, 31]], 0.1)
    assert len(teacher.asked) == 1


@pytest.mark.slow
def test_one_that_goes_away_ends_the_run_in_words(rlhf: Any, models: dict[str, Path]) -> None:
    """The rank that asks it says so; the others do not wait for it."""
    with served(models["other"]) as teacher:
        judged, options = teacher.judged, [*GKD, "--teacher-model-server", teacher.address]

        def refuse(question: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            many = len(teacher.asked) > 6
            return (400, {"error": {"message": "EngineCore is gone"}}) if many else judged(question)

        teacher.judged = refuse  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="answers 400: EngineCore is gone"):
            rlhf(2, [{"stage": 3, "per_device_batch_size": 2, "lmbda": 0.0}], *options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"teacher_model": "t"}, "--teacher-model-server http://t and --teacher-model: only one teacher can be used"),
        (
            {"gkd_logits_topk": None},
            "returns only its likeliest tokens, not the full distribution: add --gkd-logits-topk 64",
        ),
        ({"seq_kd": True}, "and --seq-kd: a server scores tokens"),
        ({"teacher_model_server": '[{"url": "http://t"}]'}, "must be the address of one server"),
        ({"rlhf_type": "dpo", "gkd_logits_topk": None}, "--teacher-model-server does not apply to --rlhf-type dpo"),
        (
            {"rlhf_type": "grpo", "gkd_logits_topk": None, "temperature": 0.9, "lmbda": 0.5},
            "Use --temperature 1",
        ),
        ({"model_stages": {"teacher_model": 2}}, "teacher_model=2 needs --teacher-model"),
    ],
)
def test_what_no_server_is_for_is_refused(options: dict[str, Any], text: str) -> None:
    given = {"rlhf_type": "gkd", "teacher_model_server": "http://t", "gkd_logits_topk": 8, "lmbda": 0.0, **options}
    config = RlhfConfig(**given)
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))
