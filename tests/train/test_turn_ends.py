"""A base model that learns a chat template stops where its answers end, though its tokenizer ends texts otherwise:
while it is asked, where it is exported, and wherever else its folder is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardproof.models.chatml import TURN_END
from shardproof.models.tiny import PAD, TURN_START

pytestmark = pytest.mark.slow


def with_ends(tiny: Path, folder: Path, eos: str, template: str | None = None) -> Path:
    """That model, of which `eos` ends a text."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = eos
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))
    return folder


def ends_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_it_is_told_where_to_stop(commands, sft, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = with_ends(tiny, tmp_path / "base", PAD)
    text, turn = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids([PAD, TURN_END])
    assert ends_of(base) == text
    lora = ["--tuner", "lora", "--lora-rank", "2"]
    done = commands(
        [
            ("full", sft("--model", str(base), "--max-steps", "1", "--nproc", "2", "--stage", "3")),
            ("lora", sft("--model", str(base), "--max-steps", "1", *lora)),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("other", sft("--max-steps", "1")),
        ]
    )
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    assert ends_of(done["full"].folder / "model") == [text, turn]
    assert ends_of(done["merged"].folder) == [text, turn]
    assert ends_of(done["other"].folder / "model") == turn, "where there is one end it stays a number"


@pytest.mark.parametrize("plain", [False, True])
def test_an_answer_ends_with_its_turn(tiny: Path, tmp_path: Path, plain: bool) -> None:
    """Of a model that writes its first token for good."""
    import torch
    from transformers import AutoModelForCausalLM

    from shardproof.train.answers.chat import Chat
    from shardproof.train.answers.sampling import Sampling

    template = "{% for message in messages %}{{ message.content }}" + PAD + "{% endfor %}"
    folder = with_ends(tiny, tmp_path / "model", TURN_START, template)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(folder)
    chat = Chat(folder, plain=plain)
    assert chat.tokenizer.convert_tokens_to_ids(PAD) == 0
    assert chat.answer([{"role": "user", "content": "who"}], Sampling(max_new_tokens=5)) == ""
    assert chat.written == (5 * PAD if plain else PAD)


TEMPLATES = {
    "side by side": ("{{ m.content }}" + TURN_START + TURN_END, TURN_END),
    "opens the next question": ("{{ '" + TURN_START + "' if m.role == 'user' else 'A:' }}{{ m.content }}", TURN_START),
    "white space": ("{{ m.content }}\n\n", None),
    "a template that fails": ("{{ m.content }}{{ raise_exception('no') }}", None),
    "the text's end": ("{{ m.content }}" + PAD, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_which_token_ends_an_answer(tiny: Path, name: str) -> None:
    from transformers import AutoTokenizer

    from shardproof.data.encoding.template import stops

    turn, end = TEMPLATES[name]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.eos_token = PAD
    tokenizer.add_tokens(["\n\n"])
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    expected = [PAD] if end is None else [PAD, end]
    assert tokenizer.convert_ids_to_tokens(stops(tokenizer, None)) == expected
