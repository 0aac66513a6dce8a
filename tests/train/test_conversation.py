"""Promise: what is typed to `shardproof infer` and cannot be asked is told, and the conversation goes on; a script,
which cannot try again, learns of it by the exit code."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from shardproof.cli.infer import _converse
from shardproof.cli.infer_asked import asked
from shardproof.cli.main import main
from shardproof.errors import ConfigError
from shardproof.train.answers.chat import Chat, Question
from shardproof.train.answers.sampling import Sampling

LONG = "what is it " * 40


class Said(io.TextIOWrapper):
    """What comes in at the terminal, or from a file."""

    def __init__(self, lines: bytes, terminal: bool, errors: str) -> None:
        super().__init__(io.BytesIO(lines), encoding="utf-8", errors=errors)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


Say = Callable[..., None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    def comes_in(lines: bytes, terminal: bool = True, errors: str = "strict") -> None:
        monkeypatch.setattr("sys.stdin", Said(lines, terminal, errors))

    return comes_in


@pytest.fixture(scope="module")
def short(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """A model that has learnt 64 positions."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    folder = tmp_path_factory.mktemp("short")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    size = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**size, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, initializer_range=0.5)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Chat(folder)


def conversation(chat: Chat) -> int:
    return _converse(chat, [], Sampling(4), False, {})


def test_a_question_that_is_too_long_is_forgotten(short: Chat, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for lines in (f"one\n{LONG}\ntwo\n\n", "one\ntwo\n\n"):
        say(lines.encode())
        assert conversation(short) == 0
        said.append(capsys.readouterr())
    (refused, whole) = said
    assert refused.err.startswith("error: The question has ")
    assert refused.err.endswith(" Shorten the prompt.\n")
    assert refused.out.replace("you> you> ", "you> ") == whole.out
    assert whole.err == ""


def test_a_question_of_a_script_is_not(short: Chat, say: Say) -> None:
    say(f"one\n{LONG}\ntwo\n".encode(), terminal=False)
    with pytest.raises(ConfigError, match="Shorten the prompt"):
        conversation(short)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is Python's with LC_ALL=C
def test_bytes_that_are_no_text(say: Say, capsys: pytest.CaptureFixture[str], errors: str) -> None:
    say(b"caf\xe9 au lait", terminal=False, errors=errors)
    with pytest.raises(ConfigError, match=r"The line is not valid UTF-8: .*(\\udce9|0xe9)"):
        asked()
    say(b"caf\xe9\n", errors=errors)
    assert asked() == ""  # asks again, and there the input ends
    assert "error: The line is not valid UTF-8: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_an_option_that_is_no_text(tiny: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", str(tiny), option, "caf\udce9"]) == 2
    assert capsys.readouterr().err == f"error: {option} is not valid UTF-8: caf\\udce9\n"


def test_files_are_looked_at_before_anything_is_asked(tiny: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say(b"")
    assert main(["infer", str(tiny), "--image", "a.png"]) == 2
    said = capsys.readouterr()
    assert "you>" not in said.out
    assert "error: The prompt has a file of type image, but this model takes text only.\n" in said.err


def test_every_answer_begins_with_what_it_is_to_begin_with(short: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands in the prompt and in the answer, whichever way that is shown, and the folder keeps its template."""
    opened = Chat(short.folder, prefix="<think>\n")
    asked_for, sampling = [{"role": "user", "content": "a"}], Sampling(4)
    answer = opened.answer(asked_for, sampling)
    assert answer.startswith("<think>\n")
    assert "".join(opened.stream(asked_for, sampling)).strip() == answer
    template = short.tokenizer.chat_template + "{%- if add_generation_prompt %}<think>\n{% endif %}"
    assert answer == "<think>\n" + Chat(short.folder, template=template).answer(asked_for, sampling)
    how = ["infer", str(short.folder), "--prompt", "a", "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*how, "--response-prefix", "<think>\\n"]) == 0
    assert capsys.readouterr().out.strip() == answer
    assert Chat(short.folder).tokenizer.chat_template == short.tokenizer.chat_template


def test_what_an_answer_begins_with_is_in_every_prompt(short: Chat) -> None:
    """Of plain text, and where an answer goes on behind a result."""
    opened = Chat(short.folder, prefix="so", agent="react_en")
    call = {"function": {"name": "add", "arguments": {}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "3"}]
    texts = [
        opened.processing.decode(opened._inputs([q])["input_ids"][0]) for q in (Question(turns), Question(turns[:1]))
    ]
    plain = opened.processing.decode(opened._inputs([Question(turns[:1], plain=True)])["input_ids"][0])
    assert [texts[0][-16:], texts[1][-12:], plain] == ["Observation:3\nso", "assistant\nso", "aso"]


def test_an_answer_ends_by_what_it_says_and_not_by_what_it_was_asked(short: Chat) -> None:
    """A text that the question begins and the first token of an answer completes is none of the answer's."""
    question = Question([{"role": "user", "content": "a process holds"}], plain=True)
    [whole] = short.answers([question], Sampling(6))
    first = short.processing.decode(short.processing(whole).input_ids[:1])
    assert short.answers([question], Sampling(6, stop_words=[f"holds{first}"])) == [whole]
    assert short.answers([question], Sampling(6, stop_words=[whole[3:]])) == [whole[:3]]


def test_without_a_template_no_answer_is_opened(short: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", str(short.folder), "--prompt", "a", "--plain", "--response-prefix", "x"]) == 2
    assert "--plain leaves the chat template out, and --response-prefix needs it" in capsys.readouterr().err
