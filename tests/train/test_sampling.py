"""How the tokens of an answer are chosen, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardproof.train.answers.sampling import Sampling

LETTERS = st.text("abc", max_size=4)


@example(["ab", "b"], ["b", "abb"])  # "b" is there before "abb" is, which begins before it
@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=3))
def test_pieces_of_an_answer_are_those_of_what_stands_before_its_first_stop_word(
    pieces: list[str], words: list[str]
) -> None:
    sampling, text = Sampling(stop_words=words), "".join(pieces)
    before = sampling.ended(text)
    assert "".join(sampling.shown(pieces)) == before
    assert not any(word in before for word in words)
    assert before == text or any(text.startswith(word, len(before)) for word in words)


def test_a_piece_is_shown_as_soon_as_it_is_no_stop_word() -> None:
    pieces, seen = iter(["one ", "E", "nd ", "EN", "D two"]), []
    for piece in Sampling(stop_words=["END"]).shown(pieces):
        seen.append(piece)
    assert seen == ["one ", "", "End ", "", ""]


@pytest.fixture(scope="module")
def writes(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes what its tokenizer knows."""
    import shutil

    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("writes") / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][len(AutoTokenizer.from_pretrained(folder)) :] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def said(writes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What `infer` answers one question, shown piece by piece, whole, and as a row beside another."""
    from shardproof.cli.main import main

    (rows := tmp_path / "rows.jsonl").write_text('{"query": "the"}\n{"query": "which of them is it"}\n')

    def ask(*options: str) -> list[str]:
        asked = ["infer", str(writes), "--max-new-tokens", "12", *options]
        answers = []
        for shown in ((), ("--stream", "no")):
            capsys.readouterr()
            assert main([*asked, "--prompt", "the", *shown]) == 0
            answers.append(capsys.readouterr().out.strip())
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        assert main([*asked, "--dataset", str(rows), "--batch-size", "2", "--result-path", str(out)]) == 0
        return [*answers, json.loads(out.read_text().splitlines()[0])["response"]]

    return ask


def generated(folder: Path, **how) -> str:
    """By transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=None, **how
    )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_answers_are_those_of_transformers(writes: Path, said) -> None:
    """And end before a stop word."""
    greedy, penalised = generated(writes), generated(writes, repetition_penalty=5.0)
    searched = generated(writes, repetition_penalty=5.0, num_beams=4)
    assert len({greedy, searched, penalised}) == 3
    assert said() == [greedy] * 3
    assert said("--temperature", "2", "--top-k", "1") == [greedy] * 3
    assert said("--repetition-penalty", "5") == [penalised] * 3
    assert said("--repetition-penalty", "5", "--num-beams", "4") == [searched] * 3
    word = penalised[len(penalised) // 2 :][:3]
    before = penalised[: penalised.index(word)].strip()
    assert 0 < len(before) < len(penalised)
    assert said("--repetition-penalty", "5", "--stop-words", "not there", word) == [before] * 3
