"""Promise: a model without a trained head for rewards is refused before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.train.model.reward_models import check_reward_model
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.recipe import _reads, check, check_scorer


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A folder with a config and the header of weights."""

    def make(kind: str, weights: list[str], **config: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind], **config}))
        empty = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in weights}
        header = json.dumps(empty).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        return str(tmp_path)

    return make


def test_a_reward_model_is_taken(model: Callable[..., str]) -> None:
    check_reward_model(model("Qwen3ForSequenceClassification", ["model.norm.weight", "score.weight"]))
    check_reward_model(model("MyJudge", ["body.weight", "classifier.dense.weight"], id2label={"0": "good"}))


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
def test_a_model_without_a_head_is_refused(model: Callable[..., str], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"is a {kind} without a reward head"):
        check_reward_model(model(kind, ["model.norm.weight", "lm_head.weight"]))


@pytest.mark.parametrize(("kind", "refused"), [("t5", True), ("bert", True), ("llama", False)])
def test_what_values_tokens_does_not_see_those_behind_them(model: Callable[..., str], kind: str, refused: bool) -> None:
    config = RlhfConfig(rlhf_type="ppo", model="x", value_model=model("", [], model_type=kind))
    with pytest.raises(ConfigError, match="has an encoder") if refused else nullcontext():
        check_scorer(config)


def test_a_classifier_is_refused(model: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="has 2 labels"):
        check_reward_model(model("XForSequenceClassification", ["score.weight"], id2label={"0": "a", "1": "b"}))


def test_so_is_one_of_two_labels_without_names(model: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="has 2 labels"):
        kind = {"problem_type": "single_label_classification"}
        check_reward_model(model("XForSequenceClassification", ["score.weight"], **kind))


def test_the_command_looks_before_it_reads(model: Callable[..., str]) -> None:
    rewards = [model("GPT2LMHeadModel", ["wte.weight"])]
    config = RlhfConfig(rlhf_type="grpo", model="tiny", dataset=["x.jsonl"], reward_model=rewards)
    with pytest.raises(ConfigError, match="--rlhf-type rm"):
        check(config.model_copy(update={"num_generations": 2}), 1)


@pytest.mark.parametrize(
    ("kind", "option"),
    [("dpo", "ref_model"), ("gkd", "teacher_model"), ("grpo", "reward_model"), ("ppo", "value_model")],
)
def test_the_small_model_is_no_other_model(kind: str, option: str, tmp_path: Path, monkeypatch) -> None:
    """It is built of the rows, for --model alone; a folder may have its name."""
    monkeypatch.chdir(tmp_path)
    given = {option: ["tiny"] if option == "reward_model" else "tiny"}
    given |= {"reward_funcs": ["format"]} if kind == "ppo" else {}
    config = RlhfConfig(rlhf_type=kind, model="tiny", dataset=["x.jsonl"], **given)
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} tiny: this small model is built from the rows of a run"):
        check(config, 1)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ConfigError, match=r"The model folder tiny has no config\.json"):
        check(config, 1)


def test_packed_weights_that_nobody_unpacks_are_refused_before_rows_are_read(model: Callable[..., str]) -> None:
    teacher = model("Qwen3ForCausalLM", ["lm_head.weight"], quantization_config={"quant_method": "modelopt"})
    config = RlhfConfig(rlhf_type="gkd", model="tiny", dataset=["x.jsonl"], teacher_model=teacher)
    with pytest.raises(ConfigError, match=r"packed as modelopt"):
        check(config, 1)


def test_plain_texts_are_judged_behind_the_begin_of_text(tiny: Path, tmp_path: Path) -> None:
    """As `rm` has the model learn them. TRL leaves it out, and a prompt may bring one."""
    from datasets import Dataset
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    begin = tokenizer.bos_token = tokenizer.pad_token
    marks = [(begin, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=marks)
    tokenizer.save_pretrained(tmp_path)

    config = RlhfConfig(rlhf_type="grpo", dataset=["rows.jsonl"])
    reads = _reads(config, Dataset.from_dict({"prompt": ["a step"]}), str(tmp_path))
    how = {"padding": True, "padding_side": "right", "add_special_tokens": False}  # TRL's
    found = reads(text=["a step", begin + "a step"], **how)["input_ids"]
    assert found == [tokenizer("a step")["input_ids"]] * 2
    assert found[0].count(tokenizer.bos_token_id) == 1
    turns = [[{"role": "user", "content": "a step"}]]
    assert _reads(config, Dataset.from_dict({"prompt": turns}), str(tmp_path)) is None


def test_the_end_of_a_text_is_trained_where_it_is_the_padding_too(commands, tiny: Path, tmp_path: Path) -> None:
    """The embedding of a token that a model is made with as its padding gets no gradient."""
    shutil.copytree(tiny, tmp_path / "model")
    tokenizer = json.loads((tiny / "tokenizer_config.json").read_text())
    tokenizer["pad_token"] = tokenizer["eos_token"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "a step", "response": "b", "rejected_response": "the rank"}) + "\n")
    argv = ["rlhf", "--rlhf-type", "rm", "--model", str(tmp_path / "model"), "--dataset", str(pairs)]
    more = "--max-steps 1 --global-batch-size 1 --lr-scheduler constant --output-dir OUT".split()
    run = commands([("judge", [*argv, *more])])["judge"]
    assert run.code == 0, run.output
    end = json.loads((tiny / "config.json").read_text())["eos_token_id"]
    folders = (tiny, run.folder / "model")
    before, after = (load_file(folder / "model.safetensors")["model.embed_tokens.weight"][end] for folder in folders)
    assert not before.equal(after)
