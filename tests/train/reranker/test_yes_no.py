"""Promise: what `sft --task generative_reranker` makes is a causal language model whose logits of "yes" and "no" behind
Qwen3-Reranker's prompt score a pair: in training, at every stage, for `infer`, after `export` and for sentence-
transformers; logits are made of last tokens alone; what cannot be asked so is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.judged import INSTRUCTION, TASK, JudgedEncoder, prompt, take_pairs
from shardproof.data.rows import Row
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig
from shardproof.train.reranker.scoring import YesNo, last_logits_only, scoring_in
from shardproof.train.run import recipe_of
from train.reranker.checks import goes_on, lines, ranks_as_it_was_evaluated
from train.reranker.test_same_losses import check

pytestmark = pytest.mark.slow

TASK_NAME = "generative_reranker"


def loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


# --- prompts -----------------------------------------------------------------------------------------

QWEN_S_OWN = """\
{%- set i = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("none") -%}
{{ i }}|{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first -}}
|{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}"""
THINKS = """\
{%- for message in messages %}{{ message.role + ":" + message.content + "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant:" }}{% if enable_thinking is defined and enable_thinking is false %}
{{- "<think></think>" }}{% endif %}{% endif %}"""


@pytest.fixture
def tokenizer(models) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models["asked"])


def test_a_pair_is_the_question_of_qwen3_reranker(tokenizer) -> None:
    tokenizer.chat_template = THINKS
    before = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    take_pairs(tokenizer, "it")
    user = "user:<Instruct>: {}\n<Query>: cat\n<Document>: meows"
    end = "\nassistant:<think></think>"
    assert prompt(tokenizer, None, "cat", "meows") == f"system:{TASK}\n" + user.format(INSTRUCTION) + end
    assert prompt(tokenizer, "Find it", "cat", "meows") == f"system:{TASK}\n" + user.format("Find it") + end
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == before
    known = tokenizer.chat_template
    take_pairs(tokenizer, "it")
    assert tokenizer.chat_template == known


def test_a_template_of_pairs_stays(tokenizer) -> None:
    tokenizer.chat_template = QWEN_S_OWN
    take_pairs(tokenizer, "it")
    assert (tokenizer.chat_template, prompt(tokenizer, "s", "q", "d")) == (QWEN_S_OWN, "s|q|d")


def test_what_is_cut_is_the_text(tokenizer) -> None:
    take_pairs(tokenizer, "it")
    encoder = JudgedEncoder(tokenizer)
    row = Row([{"role": "user", "content": "cat"}], "", 0, {"positive": ["meows " * 80], "negative": []}, "chat")
    ((_, (pair,)),) = encoder.texts([row])
    whole, cut = encoder.marked(pair, None), encoder.marked(pair, 120)
    assert whole == tokenizer(prompt(tokenizer, None, "cat", "meows " * 80), add_special_tokens=False)["input_ids"]
    assert len(cut) == 120 < len(whole)
    opening = len(tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    assert (cut[-opening:], cut[:-opening]) == (whole[-opening:], whole[: 120 - opening])


def test_the_system_message_of_a_row_is_its_instruction(tokenizer) -> None:
    take_pairs(tokenizer, "it")
    turns = [
        {"role": "system", "content": "Look"},
        {"role": "user", "content": "cat"},
        {"role": "user", "content": "dog"},
    ]
    for messages, system in ((turns, "Look"), (turns[1:], "Find")):
        row = Row(messages, "", 0, {"positive": ["a"], "negative": ["b"]}, "chat")
        encoder = JudgedEncoder(tokenizer, "Find")
        ((_, pairs),) = encoder.texts([row])
        got = [tokenizer.decode(encoder.marked(pair, None)) for pair in pairs]
        assert got == [prompt(tokenizer, system, "cat\ndog", text) for text in "ab"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "has no chat template, or several"),
        ("{% for message in messages %}{{ message.role }}{% endfor %}", "leaves out a query or a document"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}", "No system:"),
    ],
)
def test_what_cannot_be_asked(tokenizer, template: str | None, why: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=why.replace("No system:", "No system. Give another with --chat-template")):
        take_pairs(tokenizer, "it")


# --- training ----------------------------------------------------------------------------------------


def test_pairs_at_every_stage(trained) -> None:
    check(trained, "asked", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}], task=TASK_NAME)


def test_lists_and_adapters_on_head_and_all(trained) -> None:
    more = {"loss": "listwise", "loss_temperature": 0.5, "tuner": "lora", "lora_rank": 4, "task": TASK_NAME}
    check(trained, "asked", [{"stage": 3}], target_modules=["q_proj", "lm_head"], **more)


def test_logits_are_those_of_the_model_at_last_tokens(models) -> None:
    """Of rows padded on the right, with a scale and a cap that the model has by itself; of no other token are some."""
    from transformers import Cohere2Config, Cohere2ForCausalLM, Gemma2Config, Gemma2ForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"vocab_size": 64, "num_key_value_heads": 1, "pad_token_id": 0}
    for model in (
        Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=0.1, head_dim=16, **small)),
        Cohere2ForCausalLM(Cohere2Config(logit_scale=0.3, **small)),
    ):
        model.eval()
        ids, mask = torch.randint(1, 64, (3, 9)), torch.ones(3, 9, dtype=torch.long)
        mask[0, 5:] = mask[2, 2:] = 0
        with torch.no_grad():
            whole = model(input_ids=ids, attention_mask=mask).logits
            last_logits_only(model)
            got = model(input_ids=ids, attention_mask=mask)
        assert got.logits.shape == (3, 1, 64)
        torch.testing.assert_close(got.logits[:, 0], whole[torch.arange(3), torch.tensor([4, 8, 1])])
        scores = YesNo(5, 7).scores(got)
        torch.testing.assert_close(scores, got.logits[:, 0, 5] - got.logits[:, 0, 7])


# --- commands ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(commands, files, models) -> Any:
    steps = "--max-steps 6 --learning-rate 3e-3 --lr-scheduler constant --global-batch-size 8 --system Find".split()
    data = ["--dataset", str(files["ranked"]), "--val-dataset", str(files["ranked-held"])]
    base = ["sft", "--task_type", TASK_NAME, "--model", str(models["asked"]), *data, *steps, "--output-dir", "OUT"]
    lora = [*base, "--tuner", "lora", "--nproc", "2", "--save-steps", "3", "--loss_type", "listwise_reranker"]
    held = ["--dataset", str(files["ranked-held"]), "--result-path", "OUT.jsonl"]
    of_rows = ["--task", TASK_NAME, "--model", str(models["asked"]), *data[:2]]
    return commands(
        [
            ("doctor", ["doctor", *of_rows, "--trial", "no", "--nproc", "2", "--json"]),
            ("plan", ["plan", *of_rows[:4], "--gpus", "2", "--gpu-memory", "80", "--max-length", "128"]),
            ("shown", ["data", "show", *of_rows, "-n", "1"]),
            ("verify", ["verify", *of_rows, "--nproc", "2", "--loss", "listwise"]),
            ("lora", lora),
            ("went on", [*lora, "--resume", "RUNS/lora/checkpoint-3"]),
            ("full", [*base, "--nproc", "2", "--stage", "2"]),
            ("scored", ["infer", "RUNS/lora", *held, "--batch-size", "3"]),
            ("by ranks", ["infer", "RUNS/full", *held, "--batch-size", "2", "--nproc", "2"]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of merged", ["infer", "RUNS/merged", *held]),
            ("early", ["export", "RUNS/lora/checkpoint-3", "OUT"]),
            ("exported", ["export", "RUNS/full", "OUT"]),
            ("plain", ["infer", "RUNS/lora", *held, "--plain"]),
        ]
    )


@pytest.mark.slow
def test_all_went_well(done) -> None:
    for name, run in done.items():
        assert run.code == (2 if name == "plain" else 0), f"{name}:\n{run.output}"
    assert "gets texts in its chat template" in done["plain"].output
    said = done["doctor"].output
    checks = {check["name"]: check["status"] for check in json.loads(said[said.index("{") :])["checks"]}
    assert {checks[name] for name in ("weights", "memory", "lengths", "trained")} == {"ok"}
    assert "<Query>: " in done["shown"].output
    assert "equal to 0.0001" in done["verify"].output


@pytest.mark.slow
def test_a_run_goes_on(done) -> None:
    goes_on(done)


@pytest.mark.slow
def test_scores_rank_as_the_evaluation_says(done) -> None:
    ranks_as_it_was_evaluated(done)


@pytest.mark.slow
def test_transformers_and_sentence_transformers_give_the_same(done) -> None:
    for run, scored in (("exported", "by ranks"), ("merged", "of merged")):
        folder: Path = done[run].folder
        tokenizer, model = loaded(folder)
        said = scoring_in(folder)
        assert said == YesNo(*(tokenizer(word)["input_ids"][0] for word in ("yes", "no")), "Find")
        for line in lines(done, scored):
            query = line["messages"][0]["content"]
            found = [turns[0]["content"] for turns in line["positive_messages"] + line["negative_messages"]]
            for text, score in zip(found, line["scores"], strict=True):
                asked = f"<Instruct>: Find\n<Query>: {query}\n<Document>: {text}"
                turns = [{"role": "system", "content": TASK}, {"role": "user", "content": asked}]
                ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
                with torch.no_grad():
                    both = model(**ids).logits[0, -1, [said.yes, said.no]].softmax(-1)
                assert score == pytest.approx(float(both[0]), abs=1e-4)
            from sentence_transformers import CrossEncoder

            theirs = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in found])
            assert line["scores"] == pytest.approx(theirs.tolist(), abs=1e-4)
    assert scoring_in(done["early"].folder) == scoring_in(done["merged"].folder)
    assert "1_LogitScore" not in {path.name for path in done["lora"].folder.iterdir()}
    assert (done["lora"].folder / "model" / "1_LogitScore" / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"plain": True}, "--plain: the model is asked through its chat template"),
        ({"template_variables": {"enable_thinking": "True"}}, "without thinking"),
        ({"packing": True}, f"--task {TASK_NAME} and --packing"),
        ({"rope_scaling": {"type": "yarn"}}, "the model keeps its positions"),
        ({"num_labels": 2}, "--num-labels: a pair gets one score"),
        ({"loss": "infonce"}, f"--task {TASK_NAME} and --loss infonce: the loss must be pointwise or listwise"),
        ({"dataset": ["stdlib"]}, f"--task {TASK_NAME} needs rows with a 'positive'"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], why: str) -> None:
    config = SftConfig(**{"model": "tiny", "dataset": ["x.jsonl"], "task": TASK_NAME, **options})
    with pytest.raises(ConfigError) as error:
        recipe_of(config).check(config, 1)
    assert why in str(error.value)


def test_a_tokenizer_without_these_words_is_told(files, models, tmp_path: Path) -> None:
    argv = {"model": str(models["decoder"]), "dataset": [str(files["ranked"])], "output_dir": str(tmp_path / "run")}
    config = SftConfig(**argv, task=TASK_NAME)
    recipe = recipe_of(config)
    with pytest.raises(ConfigError, match="does not write the answer \"yes\" as one token, but as 'y' 'es'"):
        recipe.prepare(config, 1, *recipe.read(config))
    encoder = SftConfig(**{**argv, "model": str(models["encoder"])}, task=TASK_NAME)
    with pytest.raises(ConfigError, match="--task embedding, --task seq_cls or --task reranker"):
        recipe.prepare(encoder, 1, *recipe.read(encoder))


def test_a_model_says_its_own_words(models, tmp_path: Path) -> None:
    YesNo(40, 41, "Look").write(tmp_path)
    assert scoring_in(tmp_path) == YesNo(40, 41, "Look")
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 3, "false_token_id": null}')
    with pytest.raises(ConfigError, match="scores pairs with the logit of one token"):
        scoring_in(tmp_path)
