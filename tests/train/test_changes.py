"""Promise: new tokens and longer positions are part of the model from the first step on: the same losses at any stage,
and in what is saved, asked and merged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from shardproof.errors import ConfigError
from shardproof.train.model.changes import check_rope, grow, stretch, tokens_of
from shardproof.train.model.loading import load_model, load_processing, load_tokenizer
from shardproof.train.options.config import SftConfig

pytestmark = pytest.mark.slow

TOKENS = [f"<|{i}|>" for i in range(2100)]  # the model has 2048 rows, some of them without a token
FIRST, LAST = TOKENS[0], TOKENS[-1]


def counted(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_new_rows_are_those_of_transformers_and_old_ones_stay(tiny: Path) -> None:
    """Read when it is cut, or read whole: the same values, tied as before."""
    from transformers import AutoModelForCausalLM, set_seed

    plain = SftConfig(model=str(tiny))
    tokenizer = load_tokenizer(str(tiny), plain)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    set_seed(plain.seed)
    expected = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    rows = expected.get_input_embeddings().weight.shape[0]
    expected.resize_token_embeddings(len(tokenizer))
    new = plain.model_copy(update={"new_special_tokens": TOKENS})
    for to_shard in (False, True):
        model = load_model(str(tiny), new, to_shard=to_shard)
        weight = model.get_input_embeddings().weight
        assert rows < weight.shape[0] == len(tokenizer) == model.config.vocab_size
        assert torch.equal(weight, expected.get_input_embeddings().weight)
        same = expected.get_output_embeddings().weight is expected.get_input_embeddings().weight
        assert (model.get_output_embeddings().weight is weight) == same
        assert torch.equal(model.get_output_embeddings().weight, expected.get_output_embeddings().weight)


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_new_rows_of_a_model_that_speaks_are_those_of_what_answers(tiny_models: Any, name: str) -> None:
    plain = SftConfig(model=str(tiny_models(name)))
    before = load_model(plain.model, plain).thinker.get_input_embeddings().weight
    more = [f"<|{i}|>" for i in range(before.shape[0])]
    model = load_model(plain.model, plain.model_copy(update={"new_special_tokens": more}))
    known = len(load_tokenizer(plain.model, plain)) + len(more)
    assert model.config.get_text_config().vocab_size == known
    for weight in (model.get_input_embeddings().weight, model.thinker.get_output_embeddings().weight):
        assert weight.shape[0] == known
    assert torch.equal(model.thinker.get_input_embeddings().weight[: before.shape[0]], before)


def test_rows_that_are_there_already_are_enough(tiny: Path) -> None:
    model = load_model(str(tiny), SftConfig(model=str(tiny)))
    before = model.get_input_embeddings().weight
    grow(model, range(before.shape[0]))
    assert model.get_input_embeddings().weight is before


def test_tokens_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("<a>\n\n<b>\n")
    assert tokens_of([str(tmp_path / "tokens.txt")]) == ["<a>", "<b>"]
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        tokens_of([str(tmp_path / "none.txt")])
    with pytest.raises(ConfigError, match="'<a>' is listed twice"):
        tokens_of(["<a>", "<b>", "<a>"])


@pytest.fixture(scope="module")
def runs(commands, sft, rows: Path, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("thoughts") / "thoughts.jsonl"
    with file.open("w") as out:
        for line in rows.read_text().splitlines():
            turns = json.loads(line)["messages"]
            turns[1]["content"] = f"{FIRST}{turns[1]['content']}{LAST} so"
            out.write(json.dumps({"messages": turns}) + "\n")
    (tokens := file.with_name("tokens.txt")).write_text("\n".join(TOKENS))
    new = ["--new-special-tokens", str(tokens)]
    rope = ["--rope-scaling", "yarn", "--max-model-len", "100000"]
    saved = ["--modules-to-save", "embed_tokens", "lm_head"]
    one, two, few = ["--nproc", "1", "--stage", "0"], ["--nproc", "2", "--stage", "3"], ["--max-steps", "2"]
    data = ["--dataset", str(file)]
    return commands(
        [
            ("one", sft(*one, *data, *new, *rope)),
            ("two", sft(*two, *data, *new, *rope)),
            ("adapters", sft(*two, *data, *new, *rope, *few, "--tuner", "lora", *saved)),
            ("merged", ["export", "RUNS/adapters", "OUT"]),
            ("asked", ["infer", "RUNS/adapters", "--prompt", "the", "--max-new-tokens", "3"]),
            ("frozen", sft(*new, "--tuner", "lora")),
        ]
    )


def test_losses_are_those_of_one_process(runs) -> None:
    assert runs["one"].code == runs["two"].code == 0, runs["one"].output + runs["two"].output
    for name in ("loss", "tokens"):
        assert runs["two"].series(name) == pytest.approx(runs["one"].series(name), abs=1e-5)


def test_a_file_of_them_is_not_needed_to_repeat_the_run(runs) -> None:
    said = yaml.safe_load((runs["two"].folder / "config.yaml").read_text())
    assert said["new_special_tokens"] == TOKENS


@pytest.mark.parametrize("folder", ["two/model", "merged"])
def test_what_is_saved_knows_them(runs, folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = folder.partition("/")[0]
    assert runs[name].code == 0, runs[name].output
    path = runs["two"].folder.parent / folder
    tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
    ids = tokenizer(FIRST + LAST, add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    assert 2048 < max(ids) + 1 == len(tokenizer) == counted(path)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.max_position_embeddings == 100000
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.get_input_embeddings().weight.shape[0] == counted(path)


def test_adapters_are_asked_as_they_were_trained(runs) -> None:
    assert runs["adapters"].code == 0, runs["adapters"].output
    assert runs["asked"].code == 0, runs["asked"].output


def test_adapters_alone_would_not_learn_them(runs) -> None:
    assert runs["frozen"].code == 2
    assert "Add --modules-to-save embed_tokens lm_head" in runs["frozen"].output


# --- positions ---------------------------------------------------------------------------------------


def stretched(scaling: dict[str, str], longest: int | None = None, **more: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(max_position_embeddings=1000, **more)
    stretch(config, scaling, longest)
    return config


def test_the_factor_is_said_or_follows_from_the_length() -> None:
    said = stretched({"type": "linear", "factor": "2.5"})
    assert (said.rope_parameters["factor"], said.max_position_embeddings) == (2.5, 2500)
    follows = stretched({"type": "yarn"}, 3500)
    assert (follows.rope_parameters["factor"], follows.max_position_embeddings) == (4.0, 3500)
    again = stretched({"type": "yarn", "factor": "8"}, rope_parameters=follows.rope_parameters)
    assert again.rope_parameters["original_max_position_embeddings"] == 1000
    assert stretched({}, 700).max_position_embeddings == 700


@pytest.mark.parametrize(
    "scaling, longest, text",
    [
        ({"type": "yarn"}, None, "by how much"),
        ({"type": "long"}, 5, "one of linear, dynamic, yarn"),
        ({"factor": "2"}, None, "one of linear, dynamic, yarn"),
        ({"type": "yarn", "factor": "0.5"}, None, "1 or more"),
        ({"type": "yarn", "beta_fast": "1"}, 5, "use type and factor"),
    ],
)
def test_scalings_that_cannot_be_are_refused(scaling: dict[str, str], longest: int | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_rope(scaling, longest)


def test_positions_are_looked_at_before_rows_are(tiny_models: Any) -> None:
    config = SftConfig(model=str(tiny_models("gemma3")), rope_scaling={"type": "linear", "factor": "2"})
    with pytest.raises(ConfigError, match="gemma3 has separate rotary positions for each type of layer"):
        load_processing(config.model, config)


def test_positions_that_no_factor_scales_are_refused() -> None:
    config = SimpleNamespace(model_type="gpt2", get_text_config=lambda: SimpleNamespace(max_position_embeddings=9))
    from transformers import Gemma3TextConfig

    with pytest.raises(ConfigError, match=r"each type of layer \(sliding_attention, full_attention\)"):
        stretch(Gemma3TextConfig(), {"type": "linear", "factor": "2"}, None)
    with pytest.raises(ConfigError, match="gpt2 has no rotary positions"):
        stretch(config, {"type": "yarn", "factor": "2"}, None)
