"""Adapters that are trained on: from a run, or from a folder of PEFT's, on any number of processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardproof.cli import training
from shardproof.errors import ConfigError
from shardproof.train.model.loading import check_model_source
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig

pytestmark = pytest.mark.slow

MADE = ["--tuner", "lora", "--lora-rank", "4", "--lora-alpha", "8", "--rslora", "--learning-rate", "1e-2"]
BESIDE = ["--modules-to-save", "embed_tokens"]
ON = ["--learning-rate", "3e-3"]


@pytest.fixture(scope="module")
def runs(commands, sft, rows):
    def on(*more: str) -> list[str]:
        words = sft("--adapters", "RUNS/first", *ON, *more)
        return words[:1] + words[3:]  # --model goes without saying

    return commands(
        [
            ("first", sft(*MADE, *BESIDE, "--system", "Be brief.", "--chat-template", "chatml")),
            ("whole", ["export", "RUNS/first", "OUT"]),
            ("afresh", sft("--model", "RUNS/whole", "--max-steps", "1", "--tuner", "lora")),
            ("one", on("--nproc", "1", "--stage", "0")),
            ("two", on("--nproc", "2", "--stage", "3", "--save-steps", "2")),
            ("resumed", on("--nproc", "1", "--stage", "2", "--resume", "RUNS/two/checkpoint-2")),
            ("merged", ["export", "RUNS/two", "OUT"]),
            ("early", ["export", "RUNS/two/checkpoint-2", "OUT"]),
            ("asked", ["infer", "RUNS/two", "--prompt", "the", "--max-new-tokens", "4", "--nproc", "2"]),
        ]
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_training_begins_where_the_other_run_has_ended(runs) -> None:
    for run in runs.values():
        assert run.code == 0, run.output
    begin = runs["afresh"].series("loss")[0]  # new adapters add nothing yet
    assert runs["one"].series("loss")[0] == pytest.approx(begin, abs=2e-5)
    assert begin < runs["first"].series("loss")[0] - 0.05


def test_processes_stages_and_resuming_give_the_same_losses(runs) -> None:
    losses = runs["one"].series("loss")
    assert losses[-1] < losses[0] - 0.01
    assert runs["two"].series("loss") == pytest.approx(losses, abs=1e-5)
    assert runs["resumed"].series("loss") == pytest.approx(losses[2:], abs=1e-5)


def test_the_options_of_the_adapters_are_written_out(runs, tiny: Path) -> None:
    said = yaml.safe_load((runs["two"].folder / "config.yaml").read_text())
    assert (said["tuner"], said["lora_rank"], said["lora_alpha"], said["rslora"]) == ("lora", 4, 8.0, True)
    assert "embed_tokens" in said["modules_to_save"]
    assert said["model"] == str(tiny)
    assert said["adapters"] == str(runs["first"].folder / "model")
    adapter = json.loads((runs["two"].folder / "model" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (4, str(tiny))
    template = (runs["two"].folder / "model" / "chat_template.jinja").read_text()
    assert template == (runs["first"].folder / "model" / "chat_template.jinja").read_text()


def test_what_comes_out_is_the_base_with_the_adapters(runs, tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = logits(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), runs["two"].folder / "model")
    )
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(runs["whole"].folder)), expected, atol=1e-3)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(runs["merged"].folder)), expected, atol=1e-4)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(runs["early"].folder)), expected, atol=1e-3)


OF_TASKS = {
    "seq_cls": (["--label-names", "ham", "spam"], {"query": "the rank", "label": "spam"}),
    "embedding": (["--pooling", "mean"], {"query": "the rank", "positive": "a process"}),
    "reranker": ([], {"query": "the rank", "positive": "a process", "negative": "a gradient"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", OF_TASKS)
def test_so_it_is_of_other_tasks(commands, tiny: Path, tmp_path: Path, task: str) -> None:
    """Labels and pooling are those of the adapters."""
    more, row = OF_TASKS[task]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"query": f"the rank {i}"}) + "\n" for i in range(12)))
    both = ["sft", "--task", task, "--dataset", str(file), "--global-batch-size", "4", "--learning-rate", "1e-3"]
    both += ["--max-steps", "2", "--output-dir", "OUT"]
    found = commands(
        [
            ("first", [*both, "--model", str(tiny), "--tuner", "lora", *more]),
            ("whole", ["export", "RUNS/first", "OUT"]),
            ("afresh", [*both, "--model", "RUNS/whole", "--tuner", "lora"]),
            ("on", [*both, "--adapters", "RUNS/first", "--nproc", "2", "--stage", "3"]),
        ]
    )
    for run in found.values():
        assert run.code == 0, run.output
    assert found["on"].series("loss")[0] == pytest.approx(found["afresh"].series("loss")[0], abs=1e-5)
    first, on = (yaml.safe_load((found[name].folder / "config.yaml").read_text()) for name in ("first", "on"))
    for name in ("label_names", "num_labels", "pooling"):
        assert on[name] == first[name]


# --- what is refused ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A folder of PEFT's, made without us."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("peft") / "adapters"
    made = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), made).save_pretrained(folder)
    return folder


def parsed(*words: str, kind: type = SftConfig):
    return training.parse(kind, "", list(words))[0]


def test_a_folder_of_peft_says_what_it_is(adapters: Path, tiny: Path) -> None:
    config = parsed("--adapters", str(adapters))
    assert (config.model, config.tuner, config.lora_rank, config.lora_alpha) == (str(tiny), "lora", 2, 4)
    assert (config.target_modules, config.lora_dropout) == (["q_proj", "v_proj"], 0.1)
    assert parsed("--adapters", str(adapters), "--lora-dropout", "0").lora_dropout == 0
    assert parsed("--adapters", str(adapters), "--target-modules", "all-linear").target_modules == ["q_proj", "v_proj"]
    assert parsed("--adapters", str(adapters), "--lora-rank", "2", "--model", "other").model == "other"


def test_a_base_of_another_name_is_told(adapters: Path, tiny: Path, tmp_path: Path) -> None:
    """One folder has many spellings, and a moved one keeps its name: of those nothing is said."""
    from shardproof.train.adapters.begun import other_bases

    (tmp_path / "link").symlink_to(tiny)
    (tmp_path / "other").mkdir()
    (tmp_path / "elsewhere" / "Base-1B").mkdir(parents=True)
    cached = tmp_path / "models--org--base-1b" / "snapshots" / "0123"
    cached.mkdir(parents=True)

    def told(base: str, model: object) -> str:
        folder = tmp_path / "adapters"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapters, folder)
        said = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return " ".join(other_bases(parsed("--adapters", str(folder), "--model", str(model))))

    for model in (tiny, f"{tiny}/", tmp_path / "link"):
        assert not told(str(tiny), model)
    for model in ("org/Base-1B", tmp_path / "elsewhere" / "Base-1B", cached):
        assert not told("/gone/base-1b", model)
        assert not told("org/Base-1B", model)
    text = f"were trained on {tiny}, but --model is {tmp_path / 'other'}: on other weights"
    assert text in told(str(tiny), tmp_path / "other")
    assert "were trained on org/Base-1B, but --model is org/Base-2B" in told("org/Base-1B", "org/Base-2B")


def test_the_base_of_a_run_that_is_its_own_reference_is_told_once(adapters: Path, tiny: Path, tmp_path: Path) -> None:
    from shardproof.train.adapters.begun import other_bases
    from shardproof.train.folder import SAMPLE

    run = tmp_path / "run"
    shutil.copytree(adapters, run / "model")
    (run / SAMPLE).write_text('{"model": "m", "sample": "00000000"}')
    (tmp_path / "link").symlink_to(run)
    for model, text in ((str(tiny), "are not those that"), ("org/other", "--adapters .* were trained on")):
        for reference in (run, run / "model", tmp_path / "link"):
            said = {"adapters": str(run), "ref_adapters": str(reference), "model": model}
            (told,) = other_bases(RlhfConfig(dataset=[""], workers=0, **said))
            assert re.search(text, told)


def test_training_on_another_base_says_so_and_goes_on(commands, sft, adapters: Path, tiny: Path, tmp_path: Path):
    shutil.copytree(tiny, tmp_path / "other")
    words = ["--max-steps", "1", "--adapters", str(adapters)]
    runs = commands([("same", sft(*words)), ("other", sft(*words, "--model", str(tmp_path / "other")))])
    for run in runs.values():
        assert run.code == 0, run.output
    assert "were trained on" not in runs["same"].output
    told = f"--adapters {adapters} were trained on {tiny}, but --model is {tmp_path / 'other'}"
    assert " ".join(runs["other"].output.split()).count(told) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tuner", "full"], "merge them first: shardproof export"),
        (["--lora-rank", "8"], "--lora-rank 8: they were made with 2, which cannot change. Leave --lora-rank out"),
        (["--target-modules", "k_proj"], "made with q_proj v_proj"),
        (["--dora"], "--dora True: they were made with False"),
    ],
)
def test_an_option_that_says_something_else_is_refused(adapters: Path, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parsed("--adapters", str(adapters), *words)


def test_what_holds_no_adapters_is_refused(adapters: Path, tiny: Path, tmp_path: Path, runs) -> None:
    for named, text in [
        (tmp_path / "nowhere", "there is no such folder"),
        (tiny, f"It is a full model: use --model {tiny}"),
        (tmp_path, "there is no adapter_config.json in it"),
        (runs["two"].folder / "checkpoint-2", "is a checkpoint. Continue its run with --resume"),
    ]:
        with pytest.raises(ConfigError, match=text):
            parsed("--adapters", str(named))
    shutil.copy(adapters / "adapter_config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"there is no adapter_model.safetensors beside"):
        parsed("--adapters", str(tmp_path))
    shutil.copytree(adapters, tmp_path / "torn")
    (tmp_path / "torn" / "adapter_config.json").write_text('{"r": ')
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read: Expecting value"):
        parsed("--adapters", str(tmp_path / "torn"))
    other = json.loads((adapters / "adapter_config.json").read_text()) | {"peft_type": "POLY"}
    shutil.copytree(adapters, tmp_path / "poly")
    (tmp_path / "poly" / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(
        ConfigError, match=r"POLY, whose training cannot be continued here\. Merge them first: shardproof export"
    ):
        parsed("--adapters", str(tmp_path / "poly"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("LORA", r"Merge them .* Or continue training them: --adapters"),
        ("IA3", r"Merge them .* Or continue training them: --adapters"),
        ("POLY", r"Merge them into their model first: shardproof export \S+ FOLDER, then --model FOLDER\.$"),
        ("PREFIX_TUNING", r"They are PEFT's PREFIX_TUNING, .* cannot be merged .* Their model: \S+\.$"),
    ],
)
def test_adapters_in_the_place_of_a_model_are_told_what_becomes_of_their_kind(
    adapters: Path, tmp_path: Path, kind: str, said: str
) -> None:
    """All were sent to --adapters, which takes what is trained here, and to export, which cannot merge all of them."""
    other = json.loads((adapters / "adapter_config.json").read_text()) | {"peft_type": kind}
    (tmp_path / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=rf"holds adapters only\. {said}"):
        check_model_source(str(tmp_path))


def test_adapters_beside_a_model_are_not_to_be_merged(adapters: Path, tmp_path: Path) -> None:
    other = json.loads((adapters / "adapter_config.json").read_text()) | {"peft_type": "PROMPT_TUNING"}
    shutil.copytree(adapters, tmp_path / "prompt")
    (tmp_path / "prompt" / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(
        ConfigError, match=r"PROMPT_TUNING, whose training cannot be continued here\. They are .* cannot be merged"
    ):
        parsed("--adapters", str(tmp_path / "prompt"))


def test_adapters_that_wait_for_a_token_see_one_row_at_a_time(adapters: Path, tmp_path: Path) -> None:
    """PEFT looks for the last one in a row, and gave nothing to all but the last of those that are packed."""
    said = json.loads((adapters / "adapter_config.json").read_text()) | {"alora_invocation_tokens": [5]}
    shutil.copytree(adapters, tmp_path / "alora")
    (tmp_path / "alora" / "adapter_config.json").write_text(json.dumps(said))
    assert parsed("--adapters", str(tmp_path / "alora")).tuner == "lora"
    for option in ("--packing", "--padding-free"):
        with pytest.raises(ConfigError, match=rf"start at tokens .*alora_invocation_tokens.* {option} out"):
            parsed("--adapters", str(tmp_path / "alora"), option)


def test_those_that_do_not_fit_are_refused(adapters: Path, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from shardproof.train.adapters.adding import with_adapters

    def refused(change, text: str, task: str = "CAUSAL_LM") -> None:
        folder = tmp_path / text.replace(" ", "")[:20]
        shutil.copytree(adapters, folder)
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=text):
            with_adapters(AutoModelForCausalLM.from_pretrained(tiny), parsed("--adapters", str(folder)), task)

    name = next(iter(load_file(adapters / "adapter_model.safetensors")))
    refused(lambda weights: weights.pop(name), "is not in the files")
    refused(lambda weights: weights.update(more=torch.zeros(1)), "more is not in the model")
    refused(lambda weights: weights.update({name: torch.zeros(1, 1)}), r"is of shape \(1, 1\) there and")
    refused(lambda weights: None, "belong to a model for CAUSAL_LM, but this run trains one for SEQ_CLS", "SEQ_CLS")


@pytest.mark.parametrize(
    ("more", "made"),
    [
        (3, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        (3, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        (0, {"target_modules": ["q_proj", "embed_tokens"]}),
    ],
)
def test_whole_embeddings_beside_adapters_are_no_others(tiny: Path, tmp_path: Path, more: int, made: dict[str, Any]):
    """PEFT saves them of a model whose vocabulary has grown (--new-special-tokens), and where they have adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from shardproof.train.adapters.adding import with_adapters

    def grown() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(tiny)
        model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
        return model

    first = get_peft_model(grown(), LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **made))
    for p in first.parameters():
        if p.requires_grad:
            p.data.add_(0.01)
    first.save_pretrained(tmp_path)
    words = ["--adapters", str(tmp_path), "--model", str(tiny)]
    assert torch.equal(logits(with_adapters(grown(), parsed(*words))), logits(first))


@pytest.mark.parametrize(
    ("saved", "places"),
    [("auto", ["q_proj", "embed_tokens"]), ("auto", ["q_proj", "lm_head"]), (True, ["q_proj"])],
)
def test_whole_embeddings_beside_adapters_are_put_in_a_model_that_is_to_be_read(
    tiny: Path, tmp_path: Path, saved: Any, places: list[str]
) -> None:
    """Training on them, and asking them on several ranks, ended in an error of torch. The head is the embedding."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import shardproof
    from shardproof.integrations.pretrained import lend_readers, without_values
    from shardproof.train.adapters.adding import with_adapters
    from shardproof.train.answers.loaded import on_base

    made = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=places)
    first = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), made)
    first.get_input_embeddings().weight.data.mul_(2)  # those that are saved count, as in PEFT
    first.save_pretrained(tmp_path, save_embedding_layers=saved)
    config = parsed("--adapters", str(tmp_path), "--model", str(tiny))
    for load in (lambda model: with_adapters(model, config), lambda model: on_base(model, tmp_path, str(tiny))):
        model = load(without_values("AutoModelForCausalLM", str(tiny)))
        lend_readers(model)
        torch.testing.assert_close(logits(shardproof.shard(model, 0)), logits(first))


def test_only_those_in_parts_that_are_trained_are_trained_on(tmp_path: Path) -> None:
    """The adapters of a tower stay as they are where it is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    from shardproof.train.adapters.adding import with_adapters

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = sizes | {"num_hidden_layers": 1, "vocab_size": 64, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    base = AutoModelForImageTextToText.from_config(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    made = LoraConfig(r=2, target_modules=["q_proj", "qkv"], task_type="CAUSAL_LM")
    get_peft_model(base, made).save_pretrained(tmp_path / "both")
    words = ["--adapters", str(tmp_path / "both"), "--model", "x"]
    for freeze, kinds in [([], {"q_proj", "qkv"}), (["vision"], {"q_proj"}), (["llm"], {"qkv"})]:
        config = parsed(*words, *(["--freeze", *freeze] if freeze else []))
        model = with_adapters(AutoModelForImageTextToText.from_config(base.config), config)
        trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
        assert trained == kinds
    with pytest.raises(ConfigError, match="they are in vision, llm, but the trained parts are aligner"):
        with_adapters(
            AutoModelForImageTextToText.from_config(base.config),
            parsed(*words, "--freeze", "vision", "llm"),
            "CAUSAL_LM",
        )
    from shardproof.train.rlhf import recipe as rlhf

    config = parsed(*words, "--freeze", "vision", "--dataset", "x.jsonl", kind=RlhfConfig)
    with pytest.raises(ConfigError, match="rlhf continues training all adapters"):
        rlhf.check(config.model_copy(update={"model": "tiny"}), 1)


def test_a_part_that_the_model_lacks_is_told_before_rows_are_encoded(adapters: Path, tiny: Path) -> None:
    from shardproof.train.adapters.adding import check_named_parts

    check_named_parts(str(tiny), parsed("--adapters", str(adapters)))
    with pytest.raises(ConfigError, match="vision"):
        check_named_parts(str(tiny), parsed("--adapters", str(adapters), "--train-parts", "vision"))


def test_rlhf_takes_no_changed_model_with_them(runs, tmp_path: Path) -> None:
    shutil.copytree(runs["first"].folder, tmp_path / "run")
    said = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) | {"new_special_tokens": ["<|x|>"]}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(said))
    assert parsed("--adapters", str(tmp_path / "run")).new_special_tokens == ["<|x|>"]
    (named := tmp_path / "tokens.txt").write_text("<|x|>\n")
    assert parsed("--adapters", str(tmp_path / "run"), "--new-special-tokens", str(named))
    with pytest.raises(ConfigError, match=r"their run changed its model \(--new-special-tokens\)"):
        parsed("--adapters", str(tmp_path / "run"), kind=RlhfConfig)
    with pytest.raises(ConfigError, match="were trained with another --new-special-tokens"):
        parsed("--adapters", str(tmp_path / "run"), "--new-special-tokens", "<|y|>")
