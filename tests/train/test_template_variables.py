"""--template-variables: what a chat template finds set, in training and in the model that comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.data.encoding.template import set_template
from shardproof.errors import ConfigError

pytestmark = pytest.mark.slow

PLAIN = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.role == 'assistant' %}}{PLAIN}{{% endif %}}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{PLAIN}{{% endif %}}"
)
ASKED = [{"role": "user", "content": "the rank"}]


@pytest.fixture
def tokenizer(tiny: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def opened(tokenizer, **given) -> str:
    return tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **given)


def test_they_are_set_where_nobody_sets_them(tokenizer) -> None:
    set_template(tokenizer, THINKS)
    thinking = opened(tokenizer)
    set_template(tokenizer, None, {"enable_thinking": "false"})
    assert opened(tokenizer) == thinking + "<think>\n\n</think>\n\n"
    assert opened(tokenizer, enable_thinking=True) == thinking
    set_template(tokenizer, None, {"enable_thinking": "True"})
    assert opened(tokenizer) == thinking


@pytest.mark.parametrize(
    "value, shown",
    [("3", "4"), ("1.5", "2.5"), ("'a\" b", "'a\" b1"), ("none", "None1"), ("\U0001f600", "\U0001f6001")],
)
def test_numbers_and_texts(tokenizer, value: str, shown: str) -> None:
    shows = "{% if n is number %}{{ n + 1 }}{% else %}{{ n ~ 1 }}{% endif %}"
    text = "{% for m in messages %}{{ m.content }}{% endfor %}" + shows
    set_template(tokenizer, text, {"n": value})
    assert opened(tokenizer) == "the rank" + shown


def test_a_variable_that_the_template_does_not_ask_for(tokenizer) -> None:
    with pytest.raises(ConfigError, match="has no variable 'enable_thinking'"):
        set_template(tokenizer, None, {"enable_thinking": "false"})
    set_template(tokenizer, THINKS)
    with pytest.raises(ConfigError, match="has no variable 'm'"):  # it is of a loop
        set_template(tokenizer, None, {"m": "false"})
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="Add --chat-template"):
        set_template(tokenizer, None, {"enable_thinking": "false"})


@pytest.fixture(scope="module")
def runs(commands, sft, tiny_models, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("template") / "thinks.jinja"
    file.write_text(THINKS)
    pairs = file.parent / "pairs.jsonl"
    row = {"messages": [*ASKED, {"role": "assistant", "content": "holds"}], "rejected_response": "sends"}
    pairs.write_text(f"{json.dumps(row)}\n" * 8)
    said = ["--chat-template", str(file), "--template-variables", "enable_thinking=false"]
    media = ["--model", str(tiny_models("qwen2_5_omni")), "--max-steps", "1"]
    out = ["--output-dir", "OUT"]
    return commands(
        [
            ("run", sft(*said)),
            ("shown", ["data", "show", "RUNS/run/config.yaml", "-n", "1"]),
            ("media", sft(*said, *media)),
            ("dpo", ["rlhf", "--model", "tiny", "--dataset", str(pairs), *said, "--max-steps", "1", *out]),
            ("ask", ["infer", "RUNS/run", "--prompt", "the rank", "--template-variables", "enable_thinking=true"]),
            ("typo", ["infer", "RUNS/run", "--prompt", "the rank", "--template-variables", "enable_thinkin=true"]),
        ]
    )


@pytest.mark.parametrize("name", ["run", "media", "dpo"])
def test_they_go_with_the_model(runs, name: str) -> None:
    from transformers import AutoTokenizer

    assert runs[name].code == 0, runs[name].output
    found = AutoTokenizer.from_pretrained(runs[name].folder / "model")
    assert opened(found).endswith("<think>\n\n</think>\n\n")


def test_a_processor_is_saved_with_the_template_of_the_run(runs) -> None:
    from shardproof.models.loading.processors import load_processor

    processor = load_processor(str(runs["media"].folder / "model"), False)
    assert processor.chat_template.endswith(THINKS)
    assert processor.chat_template == processor.tokenizer.chat_template


def test_what_is_learnt_comes_behind_them(runs) -> None:
    assert runs["shown"].code == 0, runs["shown"].output
    assert "<think>\n\n</think>" in runs["shown"].output.replace("[[", "")


def test_asking(runs) -> None:
    assert runs["ask"].code == 0, runs["ask"].output
    assert runs["typo"].code == 2
    assert "has no variable 'enable_thinkin'" in runs["typo"].output
