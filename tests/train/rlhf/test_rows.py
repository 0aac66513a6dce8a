"""Promise: rows that cannot be put together into one dataset are named, with their file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding import encode as encoding
from shardproof.data.encoding.agents import with_agent
from shardproof.data.forms.formats import SFT, SUPERVISED
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.train.options.config import Batch
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import ALGORITHMS, check_cut
from shardproof.train.rlhf.behind import BEHIND
from shardproof.train.rlhf.rewards import check_rewarded
from shardproof.train.rlhf.rows import encode, example_of, form_of
from shardproof.train.rows.plain import warn_of_plain


class Words:
    """A tokenizer for conversations and texts, of which only the lengths count."""

    chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    eos_token = " <end>"
    bos_token_id = None

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **how: Any) -> str:
        return " ".join(f"{turn['content']}{turn.get('tool_calls', '')}" for turn in messages) + str(tools or "")


def refusal(tmp_path: Path, kind: str, form: Any, *rows: dict[str, Any]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RlhfConfig(rlhf_type=kind, dataset=[str(file)])
    with pytest.raises(DataError) as caught:
        encode(config, read_rows([file], form=form), Words())
    return str(caught.value)


def test_a_question_in_plain_text_is_told_of_where_the_model_has_a_chat_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ms-swift makes a conversation of a `prompt`; here, as in TRL, it is read as it stands."""
    file = tmp_path / "rows.jsonl"

    def told(row: dict[str, Any], form: Any, tokenizer: Any) -> str:
        file.write_text(json.dumps(row) + "\n")
        caplog.clear()
        warn_of_plain(read_rows([file], form=form), tokenizer, "query=prompt")
        return caplog.text

    said = told({"prompt": "2+2?"}, PROMPTS, Words())
    assert "rows.jsonl:1: 'prompt' is plain text, to which the chat template is not applied" in said
    assert "--columns query=prompt" in said
    assert not told({"prompt": "2+2?"}, PROMPTS, type("Base", (Words,), {"chat_template": None})())
    assert not told({"query": "2+2?"}, PROMPTS, Words())
    assert not told({"text": "2+2=4"}, SFT, Words())


def test_a_margin_that_no_loss_looks_at_is_not_passed_over(tmp_path: Path) -> None:
    row = {"query": "2+2?", "response": "4", "rejected_response": "5", "margin": 2.0}
    assert "rows.jsonl:1: it has a 'margin'" in refusal(tmp_path, "rm", PAIRS, row)
    rows = read_rows([str(tmp_path / "rows.jsonl")], form=PAIRS)
    assert set(encode(RlhfConfig(rlhf_type="dpo"), rows, Words()).column_names) == {"prompt", "chosen", "rejected"}


def test_a_prompt_behind_which_an_answer_goes_on_is_told_by_its_line(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    turns = [{"role": "user", "content": "2+2?"}, call, {"role": "tool", "content": "4"}]
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [*turns, {"role": "assistant", "content": "4"}], "rejected_response": "5"})
    )
    rows = read_rows([str(tmp_path / "rows.jsonl")], form=PAIRS)
    of_form = type("OfForm", (Words,), {"chat_template": with_agent(Words.chat_template, "react_en")})()
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: with this --agent-template its answer continues after a tool result"
    ):
        encode(RlhfConfig(rlhf_type="dpo"), rows, of_form)
    assert len(encode(RlhfConfig(rlhf_type="dpo"), rows, Words())) == 1


def test_what_only_a_teacher_is_to_be_asked_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "2+2?", "teacher_prompt": "2+2, which is 4?"}))
    rows = read_rows([str(tmp_path / "rows.jsonl")], form=PROMPTS)
    options = {"rlhf_type": "grpo", "reward_funcs": ["length"]}
    assert "teacher_prompt" in encode(RlhfConfig(**options), rows, Words()).column_names
    for kind in ("grpo", "gkd"):
        with pytest.raises(DataError, match=r"rows.jsonl:1: it has a 'teacher_prompt'"):
            encode(RlhfConfig(rlhf_type=kind, teacher_model="t", lmbda=1.0), rows, Words())


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({1: {"loss": True}}, r"messages\[1\] has 'loss': true, but gkd learns only the last answer"),
        ({1: {"weight": 1}}, r"messages\[1\] has 'loss': true, but gkd learns only the last answer"),
        ({1: {"loss": True}, 3: {"loss": False}}, "its last answer has 'loss': false, and gkd learns no other"),
        (
            {3: {"weight": 0.5}},
            r"'weight' of messages\[3\] must be 0 or 1 here, where all learned tokens weigh the same",
        ),
    ],
)
def test_what_gkd_is_told_to_learn_otherwise_is_not_passed_over(tmp_path: Path, marks: Any, said: str) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    rows = [{"messages": [{**turn, **marks.get(i, {})} for i, turn in enumerate(turns)]}]
    with pytest.raises(DataError, match=said):
        encoded(tmp_path, RlhfConfig(rlhf_type="gkd"), *rows)
    fine = [{**turns[0]}, {**turns[1], "loss": False}, turns[2], {**turns[3], "loss": True}]
    assert len(encoded(tmp_path, RlhfConfig(rlhf_type="gkd"), {"messages": fine})) == 1
    written = RlhfConfig(rlhf_type="gkd", lmbda=1.0)  # each last answer by the student
    assert len(encoded(tmp_path, written, {"messages": [*turns[:3], {**turns[3], "loss": False}, turns[2]]})) == 1


def test_turns_that_are_two_for_a_template_keep_their_place_in_pairs() -> None:
    """What is said before a call is a turn of its own where a template leaves it out beside the call."""

    class Parting:
        def in_its_words(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [part for turn in turns for part in ([turn, turn] if turn.get("tool_calls") else [turn])]

    asked, told = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    calls = {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function"}]}
    row = Row([asked, calls, told, asked, told], "a.jsonl", 1, {"split": 4, "rejected": [calls, told]})
    example, _ = example_of(RlhfConfig(rlhf_type="dpo", system="Be brief."), row, Parting())
    assert [len(example[part]) for part in ("prompt", "chosen", "rejected")] == [6, 1, 3]
    assert example["prompt"][-1] == asked


def test_texts_among_conversations(tmp_path: Path) -> None:
    text = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    chat = {"query": "2+2?", "response": "4", "rejected_response": "5"}
    said = refusal(tmp_path, "dpo", PAIRS, chat, text)
    assert "rows.jsonl:2 is plain text and " in said
    assert "rows.jsonl:1 is a conversation, and a run cannot mix the two" in said


@pytest.mark.parametrize("kind", ["dpo", "rm", "kto", "grpo", "orpo"])
def test_a_prompt_that_brings_the_begin_of_text_gets_no_other(tmp_path: Path, kind: str) -> None:
    """TRL has the tokenizer put one before texts. Of conversations the template writes it, and TRL adds none."""

    class Beginning(Words):
        bos_token, bos_token_id = "<begin>", 1

        def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * how.get("add_special_tokens", True) + super().__call__(text)["input_ids"]}

    file, answers = tmp_path / "rows.jsonl", {"chosen": "4", "rejected": "5", "completion": "4", "label": True}
    file.write_text("".join(json.dumps({"prompt": text, **answers}) + "\n" for text in ("<begin>2+2=", "2+2=")))
    config = RlhfConfig(rlhf_type=kind, dataset=[str(file)])
    rows = read_rows([file], form=form_of(config))
    assert [row["prompt"] for row in encode(config, rows, Beginning())] == ["2+2="] * 2
    assert encode(config, rows, Words())[0]["prompt"] == "<begin>2+2="  # of a tokenizer that puts none there


@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", "kto"))])
def test_processes_encode_the_same(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    """Too long rows, tools that are refused and all."""
    monkeypatch.setattr(encoding, "_FEW", 100)
    rest = {"response": "4", "rejected_response": "5", "label": True}
    rows: list[dict[str, Any]] = [{"query": f"what is {'so ' * (i % 7)}{i}?", **rest} for i in range(200)]
    rows[3]["query"] = "so " * 30
    rows[150]["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    found = []
    for workers in (0, 2):
        config = RlhfConfig(rlhf_type=kind, max_length=12, bad_rows="skip", workers=workers)
        dataset = encoded(tmp_path, config, *rows)
        found.append((dataset[:], dataset.report))
    assert found[0] == found[1]
    assert 0 < found[0][1].kept < 200
    rows[180] = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "completion": "4", "label": True}
    said = []
    for workers in (0, 2):
        config = RlhfConfig(rlhf_type=kind, workers=workers, dataset=["x"])
        with pytest.raises(DataError) as caught:
            encoded(tmp_path, config, *rows)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "rows.jsonl:181 is plain text and " in said[0]


def test_a_column_of_two_kinds(tmp_path: Path) -> None:
    said = refusal(
        tmp_path, "grpo", PROMPTS, {"prompt": "a", "n": 1}, {"prompt": "b", "n": 2.5}, {"prompt": "c", "n": "3"}
    )
    assert "The column 'n' holds a number in " in said
    assert "rows.jsonl:1 and text in " in said
    assert "rows.jsonl:3" in said


def encoded(tmp_path: Path, config: RlhfConfig, *rows: dict[str, Any]) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return encode(config, read_rows([file], form=form_of(config)), Words())


@pytest.mark.slow
def test_a_column_that_the_first_rows_lack_is_there(tmp_path: Path) -> None:
    """Answers for rewards, and tools, which only later rows have."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rest = {"query": "2+2?", "response": "4", "rejected_response": "5"}
    pairs = encoded(tmp_path, RlhfConfig(), *[rest] * 2, {**rest, "tools": tools})
    assert [example["tools"] for example in pairs] == [None, None, tools]
    rows = [{"query": "2+2?"}] * 1001 + [{"query": "2+2?", "solution": "4"}]
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["accuracy"])
    got = encoded(tmp_path, config, *rows)
    assert got["solution"][-2:] == [None, "4"]
    found = read_rows([tmp_path / "rows.jsonl"], form=PROMPTS)
    check_rewarded(config, Batch(micro=8, accumulation=1, world_size=1), found)


@pytest.mark.parametrize("kind", ["orpo", "cpo", "simpo"])
def test_tools_that_a_trainer_of_trl_would_lose(tmp_path: Path, kind: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row = {"query": "2+2?", "response": "4", "rejected_response": "5", "tools": tools}
    said = refusal(tmp_path, kind, PAIRS, row)
    assert f"rows.jsonl:1: it has tools, and with --rlhf-type {kind} the model would not see them" in said


def test_an_object_has_its_own_keys_and_no_others(tmp_path: Path) -> None:
    """Calls of tools, their descriptions, and columns for rewards: nothing comes over from other rows."""

    def row(name: str, value: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": {name: value}}}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call], "content": ""}]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}
        return {"messages": [*turns, {"role": "tool", "content": "3"}], "tools": [tool], "wanted": {name: value}}

    rows = [row("city", "Oslo"), row("n", 3)]
    got = encoded(tmp_path, RlhfConfig(rlhf_type="grpo"), *rows)
    assert [example["prompt"] for example in got] == [row["messages"] for row in rows]
    assert [example["wanted"] for example in got] == [row["wanted"] for row in rows]
    answer = {"role": "assistant", "content": "4"}
    pairs = [{**row, "messages": [*row["messages"], answer], "rejected_response": "5"} for row in rows]
    got = encoded(tmp_path, RlhfConfig(), *pairs)
    assert [example["tools"] for example in got] == [row["tools"] for row in rows]
    assert [example["prompt"] for example in got] == [row["messages"] for row in rows]


@pytest.mark.parametrize("form, kind", [(PAIRS, "dpo"), (SUPERVISED, "gkd")])
def test_tools_that_the_template_does_not_write(tmp_path: Path, form: Any, kind: str, monkeypatch: Any) -> None:
    """As for sft: the model would learn what it was told nothing of."""
    monkeypatch.setattr(
        Words, "apply_chat_template", lambda self, messages, **how: " ".join(turn["content"] for turn in messages)
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    said = refusal(tmp_path, kind, form, {"query": "2+2?", "response": "4", "rejected_response": "5", "tools": [tool]})
    assert "rows.jsonl:1: it has tools, which the chat template does not write" in said


@pytest.mark.parametrize("kind, form", [("dpo", PAIRS), ("grpo", PROMPTS), ("kto", JUDGED)])
def test_rows_that_the_template_refuses(tmp_path: Path, kind: str, form: Any, monkeypatch: Any) -> None:
    """Each is named, or all are passed over."""

    def refusing(self: Words, messages: list[dict[str, Any]], **how: Any) -> str:
        if messages[0]["content"] == "no":
            raise ZeroDivisionError("no such\nword")
        return " ".join(turn["content"] for turn in messages)

    monkeypatch.setattr(Words, "apply_chat_template", refusing)
    rest = {"response": "4", "rejected_response": "5", "label": True}
    rows = [{"query": question, **rest} for question in ("no", "2+2?", "no")]
    said = refusal(tmp_path, kind, form, *rows)
    assert "2 of 3 rows cannot be used" in said
    assert "rows.jsonl:3: the chat template refuses this conversation: no such word\n" in said
    config = RlhfConfig(rlhf_type=kind, bad_rows="skip")
    assert len(encoded(tmp_path, config, *rows)) == 1


def test_a_pupil_that_writes_every_answer_needs_none(tmp_path: Path) -> None:
    question = {"role": "user", "content": "2+2?"}
    rows = [{"messages": [question]}, {"messages": [question, {"role": "assistant", "content": "4"}]}]
    nothing = {"role": "assistant", "content": ""}
    for given in ({"lmbda": 1.0}, {"seq_kd": True}):
        got = encoded(tmp_path, RlhfConfig(rlhf_type="gkd", **given), *rows)
        assert [example["messages"] for example in got] == [[question, nothing]] * 2
    with pytest.raises(DataError, match="no turn of role 'assistant'"):
        encoded(tmp_path, RlhfConfig(rlhf_type="gkd"), rows[0])


def test_of_each_row_of_gkd_it_is_known_how_much_stands_behind_its_answer(
    models: dict[str, Path], files: dict[str, Path]
) -> None:
    """Batches are made of that, and of no second encoding of the row."""
    from transformers import AutoTokenizer

    from shardproof.train.rlhf.distilled import AsInSft

    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    rows = read_rows([files["chats"]], form=SUPERVISED)
    got = encode(RlhfConfig(rlhf_type="gkd", max_length=256), rows, tokenizer)
    labels = [made[1] for _, made in encoding.Encoder(tokenizer, "answer", None).encode(rows)]
    behind = [next(n for n, label in enumerate(reversed(of_row)) if label != -100) for of_row in labels]
    assert got[BEHIND] == behind
    assert min(behind) == 1, "the template writes nothing behind an answer"
    examples = [got[i] for i in range(len(got))]
    for more in (0, 2):
        batch = AsInSft(tokenizer, 256)([{**row, BEHIND: row[BEHIND] + more} for row in examples])
        learnt = [of_row[of_row != -100].tolist() for of_row in batch["labels"]]
        expected = [[token for token in of_row if token != -100] for of_row in labels]
        assert learnt == [tokens[: len(tokens) - more] for tokens in expected]


@pytest.mark.parametrize(("kind", "kept", "cut"), [("dpo", 2, 1), ("kto", 2, 1), ("orpo", 2, 1), ("simpo", 2, 1)])
def test_a_row_of_which_no_answer_would_be_left_is_left_out(tmp_path: Path, kind: str, kept: int, cut: int) -> None:
    """TRL left it out later, behind our back, or learnt from no tokens, which is NaN."""
    rest = {"response": "it is 4", "rejected_response": "it is 5", "label": True}
    texts = {"completion": " is 4", "chosen": " is 4", "rejected": " is 5", "label": True}
    for rows in (
        [{"query": f"{'so ' * n}2+2?", **rest} for n in (1, 6, 7)],
        [{"prompt": f"{'so ' * n}2+2", **texts} for n in (1, 6, 7)],
    ):
        got = encoded(tmp_path, RlhfConfig(rlhf_type=kind, max_length=8, truncation="right"), *rows)
        assert (len(got), got.report.kept, got.report.cut, got.report.rows) == (kept, kept, cut, 3)
        assert [got.places[i] for i in range(2)] == [f"{tmp_path}/rows.jsonl:{n}" for n in (1, 2)]


def test_a_row_of_which_no_question_would_be_left_is_left_out(tmp_path: Path) -> None:
    """With gkd, which cuts at the beginning, TRL ended the run when such a row came."""
    config = RlhfConfig(rlhf_type="gkd", max_length=4, truncation="left")
    rows = [{"query": f"{'so ' * n}2+2?", "response": f"{'it is ' * m}4"} for n, m in ((0, 1), (2, 1), (0, 2), (2, 2))]
    got = encoded(tmp_path, config, *rows)
    assert [got.places[i] for i in range(len(got))] == [f"{tmp_path}/rows.jsonl:{n}" for n in (1, 2)]
    assert (got.report.kept, got.report.cut, got.report.rows) == (2, 1, 4)


def test_the_end_of_a_text_counts(tmp_path: Path) -> None:
    """TRL adds it, and its reward trainer left a row out that was too long with it."""
    row = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    short = {"prompt": "2 + 2", "chosen": " 4", "rejected": " 5"}
    got = encoded(tmp_path, RlhfConfig(rlhf_type="rm", max_length=5), row, short)
    assert got["prompt"] == ["2 + 2"]
    assert got.report.longest == 6


@pytest.mark.parametrize(
    ("kind", "how", "said"),
    [
        ("kto", "left", "only supports --truncation right: use that, or drop long rows"),
        ("simpo", "left", "only supports --truncation right"),
        ("gkd", "right", "only supports --truncation left"),
        ("rm", "right", "does not truncate rows: raise --max-length, or drop long rows with --truncation drop"),
        ("grpo", "left", "does not truncate rows: raise --max-length"),
    ],
)
def test_rows_that_would_not_be_cut_so_are_refused(kind: str, how: Any, said: str) -> None:
    """Their trainers cut at the other end, or not at all, whatever is asked for."""
    config = RlhfConfig(rlhf_type=kind, truncation=how, teacher_model="t", reward_funcs=["length"])
    config = config.model_copy(update={} if kind == "gkd" else {"teacher_model": None})
    config = config.model_copy(update={} if kind == "grpo" else {"reward_funcs": []})
    with pytest.raises(ConfigError, match=said):
        check_cut(config)
    for other in ("drop", "raise", *ALGORITHMS[kind].cuts):
        check_cut(config.model_copy(update={"truncation": other}))


@pytest.mark.parametrize(
    ("given", "option"),
    [({}, "--gradient-accumulation-steps"), ({"steps_per_generation": 4}, "--steps-per-generation")],
)
def test_fewer_prompts_than_are_answered_at_once(given: dict[str, Any], option: str) -> None:
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], num_generations=2, **given)
    with pytest.raises(DataError, match=f"Lower --per-device-batch-size or {option}, or raise --num-generations"):
        check_rewarded(config, Batch(micro=4, accumulation=1, world_size=1), [])
