"""Labels stand on the answers and on nothing else, whatever the template, the tokenizer and the length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import trl

from shardproof.data.encoding import encode
from shardproof.data.encoding.beside import telling
from shardproof.data.encoding.encode import IGNORE, collate, encode_rows
from shardproof.data.encoding.learnt import past_empty_thoughts
from shardproof.data.encoding.template import Template, set_template
from shardproof.data.forms.formats import SFT
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.chatml import CHATML

# The same text without the marks that say what an answer is.
PLAIN_CHATML = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def chat(*turns: str, **extra) -> Row:
    roles = ["user", "assistant"] * len(turns)
    return Row([{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)], "a.jsonl", 7, extra)


def text(prompt: str, completion: str) -> Row:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return Row(turns, "a.jsonl", 7, kind="text")


def learnt(dataset, tokenizer, row=0) -> str:
    return tokenizer.decode([label for label in dataset[row]["labels"] if label != IGNORE])


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML], ids=["marked", "unmarked"])
def test_answers_and_their_ends_are_learnt(tokenizer, template):
    tokenizer.chat_template = template
    dataset = encode_rows([chat("Hi", "Hello!", "2 + 2?", "It is 4.")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer) == "Hello!<|im_end|>It is 4.<|im_end|>"
    assert tokenizer.decode(dataset[0]["input_ids"]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("behind", "learnt_of_it"), [("<|im_end|>\n", "<|im_end|>"), ("\n<|im_end|>", "\n<|im_end|>"), ("", "<|im_end|>")]
)
def test_marks_that_leave_out_what_ends_an_answer_take_it_in(tokenizer, behind, learnt_of_it):
    """As in LLaVA-OneVision's template: of the answers alone no model would learn to stop."""
    bare = CHATML.replace(" + '<|im_end|>' }}\n        {%- endgen", " }}\n        {%- endgen")
    end = "{%- endgeneration %}"
    tokenizer.chat_template = bare.replace(end, f"{end}{{{{- {behind!r} }}}}")
    dataset = encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer) == "Hello!" + ("\n" if not behind else "") + learnt_of_it


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML], ids=["marked", "unmarked"])
def test_a_turn_with_loss_false_is_context(tokenizer, template):
    tokenizer.chat_template = template
    row = chat("Hi", "Hello!", "2 + 2?", "It is 4.")
    row.messages[1]["loss"] = False
    assert learnt(encode_rows([row], tokenizer, max_length=None), tokenizer) == "It is 4.<|im_end|>"


def test_loss_last_round_learns_the_last_answer(tokenizer):
    tokenizer.chat_template = PLAIN_CHATML
    rows = [chat("Hi", "Hello!", "2 + 2?", "It is 4."), chat("Hi", "Hello!"), text("2 + 2 =", " 4")]
    dataset = encode_rows(rows, tokenizer, max_length=None, loss="last_round")
    assert [learnt(dataset, tokenizer, i) for i in (0, 1)] == ["It is 4.<|im_end|>", "Hello!<|im_end|>"]
    assert dataset[2]["labels"] == encode_rows(rows[2:], tokenizer, max_length=None)[0]["labels"]
    assert "loss" not in rows[0].messages[1]
    rows[0].messages[3]["loss"] = False  # told as rows that a cut had left without an answer
    with pytest.raises(DataError, match=r"a\.jsonl:7: its last answer has loss: false, but --loss last_round"):
        encode_rows(rows, tokenizer, max_length=None, loss="last_round")


# As Qwen3's: without a thought there is one of nothing, which some templates write where an answer is asked for.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS = THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("template", [THINKS, OPENS], ids=["whole", "opened"])
def test_a_thought_of_nothing_need_not_be_learnt(tokenizer, template):
    tokenizer.chat_template = template
    row = chat("Hi", "Hello!", "2 + 2?", "It is 4, </think> or <think></think>.")
    row.messages[1]["reasoning_content"] = "A greeting."

    def learns(loss: str) -> str:
        return learnt(encode_rows([row], tokenizer, max_length=None, loss=loss), tokenizer)

    thought, nothing = "A greeting.\n</think>\n\nHello!<|im_end|>", "\n</think>\n\n"
    opened = "" if template == OPENS else "<think>\n"
    last = "It is 4, </think> or <think></think>.<|im_end|>"
    assert learns("answer") == opened + thought + opened + nothing + last
    assert learns("answer+ignore_empty_think") == opened + thought + last
    assert learns("last_round+ignore_empty_think") == last
    first, second = row.messages[1], row.messages[3]
    second["reasoning_content"] = first.pop("reasoning_content")
    whole = opened + "A greeting.\n</think>\n\n" + last
    assert learns("answer+ignore_empty_think") == "Hello!<|im_end|>" + whole, "the first thought is not its"


def test_a_question_that_repeats_the_answer_is_not_learnt(tokenizer):
    tokenizer.chat_template = PLAIN_CHATML
    dataset = encode_rows([chat("yes", "yes", "yes", "yes")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer) == "yes<|im_end|>yes<|im_end|>"


def test_loss_all_learns_every_token(tokenizer):
    dataset = encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None, loss="all")
    assert dataset[0]["labels"] == dataset[0]["input_ids"]


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML], ids=["marked", "unmarked"])
def test_a_question_with_loss_false_is_not_learnt_with_all_the_rest(tokenizer, template):
    """`--loss all` learnt it, whatever its turn said. What ends and opens turns is the template's."""
    tokenizer.chat_template = template
    row = chat("Hi there", "Hello!", "2 + 2?", "It is 4.")
    row.messages[0]["loss"] = False
    of_all = encode_rows([row], tokenizer, max_length=None, loss="all")
    whole = tokenizer.decode(of_all[0]["input_ids"])
    assert learnt(of_all, tokenizer) == whole.replace("Hi there", "", 1)
    row.messages[1]["loss"] = False
    assert learnt(encode_rows([row], tokenizer, max_length=None, loss="all"), tokenizer) == (
        whole.replace("Hi there", "", 1).replace("Hello!<|im_end|>", "", 1)
    )
    assert learnt(encode_rows([row], tokenizer, max_length=None), tokenizer) == "It is 4.<|im_end|>"


def test_a_system_message_is_given_to_rows_without_one(tokenizer):
    own = chat("Hi", "Hello!")
    own.messages.insert(0, {"role": "system", "content": "Mine."})
    dataset = encode_rows([chat("Hi", "Hello!"), own], tokenizer, max_length=None, system="Yours.")
    texts = [tokenizer.decode(row["input_ids"]) for row in dataset]
    assert ["Yours." in t for t in texts] == [True, False]
    assert ["Mine." in t for t in texts] == [False, True]


def test_plain_text_rows_need_no_template_and_learn_to_stop(tokenizer):
    tokenizer.chat_template = None
    dataset = encode_rows([text("2 + 2 =\n", "4")], tokenizer, max_length=None)
    assert tokenizer.decode(dataset[0]["input_ids"]) == "2 + 2 =\n4<|im_end|>"
    assert learnt(dataset, tokenizer) == "4<|im_end|>"


def test_plain_text_rows_begin_as_the_tokenizer_begins_a_text(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    dataset = encode_rows([text("2 + 2 = ", "4")], tokenizer, max_length=None)
    assert tokenizer.decode(dataset[0]["input_ids"]) == "<|endoftext|>2 + 2 = 4<|im_end|>"


@pytest.mark.parametrize("begin", ["", "<|endoftext|>"])
def test_a_text_that_has_its_begin_and_its_end_gets_no_others(tokenizer, begin):
    """As TRL leaves an end at that; for other programs both are written into the rows."""
    from tokenizers.processors import TemplateProcessing

    if begin:
        tokenizer.bos_token = begin
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    end = tokenizer.eos_token
    bare, written = (
        [text("2 + 2 = ", "4"), text("", "the path")],
        [
            text(f"{begin}2 + 2 = ", f"4{end}"),
            text("", f"{begin}the path{end}"),
        ],
    )
    asked, raw = (encode_rows(rows, tokenizer, max_length=None) for rows in (bare, written))
    assert raw["input_ids"] == asked["input_ids"]
    assert raw["labels"][0] == asked["labels"][0]
    assert raw["labels"][1][1:] == asked["labels"][1][1:]  # nothing predicts the first


@pytest.mark.parametrize("begin", ["", "<|endoftext|>"])
@pytest.mark.parametrize("loss", ["answer", "last_round", "all"])
def test_every_token_of_raw_text_and_its_end_are_learnt(tokenizer, write, begin, loss):
    from tokenizers.processors import TemplateProcessing

    if begin:
        tokenizer.bos_token = begin
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    file = write("raw.jsonl", [{"text": " return the path\n"}])
    (row,) = encode_rows(read_rows([file], form=SFT), tokenizer, max_length=None, loss=loss)
    words = tokenizer(" return the path\n", add_special_tokens=False)["input_ids"]
    assert row["input_ids"] == [*([tokenizer.bos_token_id] * bool(begin)), *words, tokenizer.eos_token_id]
    assert row["labels"][1:] == row["input_ids"][1:]  # nothing predicts the first
    assert begin or row["labels"] == row["input_ids"]


def test_a_token_that_reaches_into_the_prompt_is_not_learnt(tokenizer):
    """` return` is one token: where the prompt ends inside it, the model is given it."""
    tokenizer.chat_template = None
    assert len(tokenizer(" return")["input_ids"]) == 1
    dataset = encode_rows([text(" re", "turn the")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer) == " the<|im_end|>"


def test_an_answer_that_shares_its_token_with_the_space_before_it_is_learnt(tokenizer):
    dataset = encode_rows([text("Say: ", "this")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer) == " this<|im_end|>"


def test_a_tokenizer_that_cannot_say_where_tokens_stand_gives_the_same_labels(tokenizer):
    class Slow:
        """The tokenizer without offsets, as those written in Python are."""

        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **options):
            assert "return_offsets_mapping" not in options
            return tokenizer(*args, **options)

    rows = [chat("Hi", "Hello!", "2 + 2?", "It is 4."), text("Say:", " this")]
    assert (
        encode_rows(rows, Slow(), max_length=None).to_list() == encode_rows(rows, tokenizer, max_length=None).to_list()
    )


# --- length ------------------------------------------------------------------------------------------

LENGTH = 24


@pytest.fixture
def short_and_long():
    return [chat("Hi", "Hello!"), chat("Hi", "word " * 50), chat("word " * 50, "Hello!")]


def test_longer_rows_are_left_out_and_counted(tokenizer, short_and_long):
    dataset = encode_rows(short_and_long, tokenizer, max_length=LENGTH)
    assert len(dataset) == 1
    report = dataset.report
    assert (report.rows, report.kept, report.dropped, report.truncated, report.unlearnable) == (3, 1, 2, 0, 0)
    assert report.longest > LENGTH
    assert "2 rows left out as too long" in str(report)


@pytest.mark.parametrize("side, kept", [("right", [0, 1]), ("left", [0, 1, 2])])
def test_longer_rows_can_be_cut_on_either_side(tokenizer, short_and_long, side, kept):
    whole = encode_rows(short_and_long, tokenizer, max_length=None).to_list()
    dataset = encode_rows(short_and_long, tokenizer, max_length=LENGTH, truncation=side)
    part = slice(LENGTH) if side == "right" else slice(-LENGTH, None)
    assert dataset.to_list() == [{name: ids[part] for name, ids in whole[i].items()} for i in kept]
    assert dataset.report.truncated == len(kept) - 1
    assert dataset.report.unlearnable == 3 - len(kept)


def test_a_longer_row_can_be_an_error(tokenizer, short_and_long):
    with pytest.raises(DataError, match=r"a.jsonl:7: the row has \d+ tokens, --max-length is 24"):
        encode_rows(short_and_long, tokenizer, max_length=LENGTH, truncation="raise")


def test_every_row_too_long_is_one_clear_error(tokenizer, short_and_long):
    with pytest.raises(DataError, match=r"Every row is longer than --max-length 5: the 3 rows have \d+ to \d+ tokens"):
        encode_rows(short_and_long, tokenizer, max_length=5)


def test_no_answer_within_the_length_is_one_clear_error(tokenizer, short_and_long):
    with pytest.raises(DataError, match="No row has an answer within --max-length 5"):
        encode_rows(short_and_long[2:], tokenizer, max_length=5, truncation="right")


def test_no_rows_and_no_room_are_errors(tokenizer):
    with pytest.raises(DataError, match="no rows to train on"):
        encode_rows([], tokenizer, max_length=5)
    with pytest.raises(ConfigError, match="leaves no room"):
        encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=1)


# --- templates ---------------------------------------------------------------------------------------


def test_no_chat_template_says_what_to_do(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template(?s:.*)--chat-template"):
        encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None)


def test_a_template_can_be_named_read_from_a_file_or_given(tokenizer, tmp_path):
    expected = encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None).to_list()
    file = tmp_path / "template.jinja"
    file.write_text(PLAIN_CHATML)
    for template in ("chatml", str(file), PLAIN_CHATML):
        tokenizer.chat_template = None
        set_template(tokenizer, template)
        assert encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None).to_list() == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages", "fails on a question and its answer"),
        ("{{ raise_exception('no!') }}", "fails on a question and its answer: no!"),
        ("hello {{ bos_token }}", "it leaves out the text of a message"),
        ("hello", "there is no Jinja"),
    ],
)
def test_a_broken_template_is_one_clear_error(tokenizer, tmp_path, template, message):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    with pytest.raises(ConfigError, match=message):
        set_template(tokenizer, str(file))


def test_an_unknown_template_is_one_clear_error(tokenizer):
    with pytest.raises(ConfigError, match=r"--chat-template chatmll cannot be read: No such file(?s:.*)chatml"):
        set_template(tokenizer, "chatmll")


def test_a_conversation_the_template_refuses_is_named_by_its_line(tokenizer):
    tokenizer.chat_template = (
        "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + PLAIN_CHATML
    )
    rows = [chat("a", "b", "c", "d"), chat("Hi", "Hello!"), chat("e", "f", "g", "h")]
    told = (
        r"2 of 3 rows cannot be used:(\n  a.jsonl:7: the chat template refuses this conversation: one turn only){2}\n"
    )
    with pytest.raises(DataError, match=told):
        encode_rows(rows, tokenizer, max_length=None)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_long_raw_text_becomes_several_rows(tokenizer, write, workers):
    """One after the other; a conversation of that length is left out, and a last token alone is nothing to learn."""
    texts = ["a return of the path", "the", "path " * 40]
    chat = {"messages": [{"role": "user", "content": "path " * 40}, {"role": "assistant", "content": "the"}]}
    file = write("raw.jsonl", [{"text": text} for text in texts] * (700 if workers else 1) + [chat])
    whole = encode_rows(read_rows([file], form=SFT), tokenizer, max_length=None, workers=workers)
    size = 8
    expected = [ids[i : i + size] for ids in whole["input_ids"][:-1] for i in range(0, len(ids) - 1, size)]
    split = encode_rows(read_rows([file], form=SFT), tokenizer, max_length=size, truncation="split", workers=workers)
    assert split["input_ids"] == expected
    assert split["labels"] == expected
    report = split.report
    assert (report.kept + report.dropped, report.dropped, report.truncated) == (len(whole), 1, 0)
    assert len(split) == len(whole) - 1 - report.split + report.pieces
    assert len(split.places) == len(split)
    assert f"{report.split} rows split into {report.pieces}" in str(report)
    assert max(map(len, split["input_ids"])) == size


def test_rows_that_a_model_of_text_cannot_take_may_be_passed_over(tokenizer, tmp_path):
    """Among many rows one with a picture, and one that the template refuses."""
    tokenizer.chat_template = (
        "{% if 'no' in messages[0]['content'] %}{{ raise_exception('no!') }}{% endif %}" + PLAIN_CHATML
    )
    file = tmp_path / "some.jsonl"
    questions = ["Hi" if i % 300 else "no" for i in range(700)]
    lines = [json.dumps({"query": question, "response": f"{i}"}) for i, question in enumerate(questions)]
    lines.insert(5, json.dumps({"query": "<image>What?", "response": "A cat.", "images": ["cat.png"]}))
    file.write_text("\n".join(lines))
    rows = read_rows([str(file)])
    dataset = encode_rows(rows, tokenizer, max_length=None, bad_rows="skip")
    assert [row.line for row in rows.skipped] == [1, 6, 302, 602]
    assert "file of type image" in str(rows.skipped[1])
    assert len(dataset) == dataset.report.rows == 697
    texts = [tokenizer.decode(row["input_ids"]) for row in dataset]
    assert all(f"\n{i}<" in text for i, text in zip([i for i in range(700) if i % 300], texts, strict=True))
    with pytest.raises(DataError, match="4 of 701 rows cannot be used"):
        encode_rows(read_rows([str(file)]), tokenizer, max_length=None)
    file.write_text(lines[0])
    with pytest.raises(DataError, match="1 of 1 row cannot be used"):
        encode_rows(read_rows([str(file)]), tokenizer, max_length=None, bad_rows="skip")


@pytest.mark.parametrize("loss", ["answer", "all"])
def test_tools_that_the_template_does_not_write_are_an_error(tokenizer, loss):
    """A call would be learnt as an empty answer, and nobody would see it."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = chat("3 + 4?", "", "7", "It is 7.")
    calls.messages[1]["tool_calls"] = [call]
    content = "message['content']"
    knows = "{{ tools | tojson if tools }}" + CHATML.replace(
        content, "(message.tool_calls or '') | string + " + content
    )
    for row, unseen in ((calls, "calls of tools"), (chat("Hi", "Hello!", tools=tools), "tools")):
        tokenizer.chat_template = CHATML
        said = (
            f"a.jsonl:7: it has {unseen}, which the chat template does not write; .*--chat-template, .*--agent-template"
        )
        with pytest.raises(DataError, match=said):
            encode_rows([row], tokenizer, max_length=None, loss=loss)
        tokenizer.chat_template = knows
        assert "add" in tokenizer.decode(encode_rows([row], tokenizer, max_length=None, loss=loss)[0]["input_ids"])
    tokenizer.chat_template = CHATML
    assert len(encode_rows([chat("Hi", "Hello!", tools=[])], tokenizer, max_length=None)) == 1


def test_an_answer_without_an_end_gets_one(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    dataset = encode_rows([chat("Hi", "Hello!")], tokenizer, max_length=None)
    assert learnt(dataset, tokenizer).endswith("Hello!\n<|im_end|>")


def test_an_answer_that_the_template_leaves_out_is_an_error(tokenizer):
    """A template that shows the last two messages only."""
    tokenizer.chat_template = PLAIN_CHATML.replace("in messages", "in messages[-2:]")
    with pytest.raises(ConfigError, match=r"a.jsonl:7: .* messages\[1\](?s:.*)--loss all"):
        encode_rows([chat("a", "first", "c", "second")], tokenizer, max_length=None)
    encode_rows([chat("a", "first", "c", "second")], tokenizer, max_length=None, loss="all")


CONVERSATIONS = {
    "one turn": ["Question one", "Answer one."],
    "two turns": ["Question one", "Answer one.", "Question two", "Answer two."],
    "thinking": ["Question one", "<think>\nhm\n</think>\n\nAnswer one.", "Question two", "<think>o</think>Answer two."],
}
TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
# What the tokenizers of these models have as special tokens, as far as their templates show it.
SPECIAL = re.compile(
    "<[|\uff5c][^<>{}|\uff5c\\s]+[|\uff5c]>|<\\w+[|]>|<[|]\\w+>"
    "|</?(?:think|tool_call)>|<(?:start_of_turn|end_of_turn|end_of_utterance)>|</s>"
)


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_of_real_models_learn_the_answers_and_not_the_questions(tokenizer, file, name):
    template = file.read_text()
    tokenizer.add_special_tokens({"extra_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.bos_token = "<|endoftext|>"
    # Without the marks, so that answers have to be found.
    tokenizer.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    turns = CONVERSATIONS[name]
    row = chat(*turns)
    text, spans = Template(tokenizer).render_answers(row.messages)
    answers = [text[start:end] for start, end in spans]
    assert len(answers) == len(turns) // 2
    for answer, turn in zip(answers, turns[1::2], strict=True):
        said = turn.rpartition("</think>")[2].strip()
        assert said in answer
        assert "Question" not in answer
        ending = answer.partition(said)[2]
        assert ending, "the end of the turn is learnt, too"
        assert answer.count("Answer") == 1
    for (start, end), (other, last) in zip(spans, past_empty_thoughts(text, spans), strict=True):
        assert last == end
        assert not re.sub(r"</?think>", "", text[start:other]).strip(), "only a thought of nothing is passed"
        assert not re.match(r"(<think>)?\s*</think>", text[other:end])


def test_the_embedded_rows_encode_and_collate(tokenizer):
    dataset = encode_rows(read_rows(["stdlib#50"]), tokenizer, max_length=512)
    assert dataset.column_names == ["input_ids", "labels"]
    batch = collate([dataset[i] for i in range(3)], tokenizer.pad_token_id)
    length = batch["input_ids"].shape[1]
    assert length == max(len(dataset[i]["input_ids"]) for i in range(3))
    for i in range(3):
        n = len(dataset[i]["input_ids"])
        assert batch["input_ids"][i].tolist() == dataset[i]["input_ids"] + [tokenizer.pad_token_id] * (length - n)
        assert batch["labels"][i].tolist() == dataset[i]["labels"] + [IGNORE] * (length - n)
        assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (length - n)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """So many rows that processes encode them; some cannot be used, some are long."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    with path.open("w") as file:
        for i in range(300):
            row = {"query": f"What is {i} times {i}?" * (1 + i % 7), "response": f"{i * i}"}
            if i in (5, 299):
                row |= {"query": "<image>which?", "images": ["none.png"]}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("truncation", ["drop", "right"])
def test_processes_encode_the_same(tokenizer, many, truncation, monkeypatch):
    monkeypatch.setattr(encode, "_FEW", 200)
    tokenizer.chat_template = PLAIN_CHATML
    found, state = [], torch.get_rng_state()
    for workers in (0, 2):
        rows, heard = read_rows([many]), []
        with telling(lambda *told, heard=heard: heard.append(told)):
            dataset = encode_rows(
                rows,
                tokenizer,
                max_length=60,
                truncation=truncation,
                bad_rows="skip",
                loss="last_round",
                workers=workers,
            )
        assert [done for done, *_ in heard] == list(range(1, heard[0][1] + 1))
        found.append((dataset[:], dataset.report, [str(bad) for bad in rows.skipped]))
    assert found[0] == found[1]
    assert state.equal(torch.get_rng_state())
    assert found[0][1].longest > 60
    assert [bad.split(":")[1] for bad in found[0][2]] == ["6", "300"]


@pytest.mark.slow
def test_what_processes_cannot_encode_is_said_as_by_one(tokenizer, many, monkeypatch):
    monkeypatch.setattr(encode, "_FEW", 200)
    tokenizer.chat_template = PLAIN_CHATML
    marks_nothing = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    for options, template in (({"max_length": 60, "truncation": "raise"}, PLAIN_CHATML), ({}, marks_nothing), ({}, "")):
        tokenizer.chat_template = template or PLAIN_CHATML
        said = []
        for workers in (0, 2):
            with pytest.raises((ConfigError, DataError)) as caught:
                encode_rows(read_rows([many]), tokenizer, **{"max_length": None, **options}, workers=workers)
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]


def test_places_are_those_of_the_rows_that_are_learnt(tokenizer, tmp_path: Path) -> None:
    """Also where others between them are left out, and after a journey to another process."""
    import pickle

    file = tmp_path / "rows.jsonl"
    answers = ["short", "long " * 200, "short again"]
    file.write_text("".join(json.dumps({"query": "a", "response": answer}) + "\n" for answer in answers))
    dataset = encode_rows(read_rows([file, file]), tokenizer, max_length=40)
    places = pickle.loads(pickle.dumps(dataset)).places
    assert [places[i] for i in range(len(dataset))] == [f"{file}:{line}" for line in (1, 3, 1, 3)]
