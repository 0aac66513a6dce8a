"""The model of a run as an ordinary model folder: merged, in another dtype, split, and computing the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch


@pytest.fixture(scope="module")
def exports(commands, sft):
    """Runs with a checkpoint, and what is exported of them."""
    lora = ["--tuner", "lora", "--target-modules", "q_proj", "v_proj", "--learning-rate", "3e-2"]
    return commands(
        [
            ("full", sft("--max-steps", "2", "--save-steps", "1", "--stage", "2")),
            ("lora", sft("--max-steps", "2", "--save-steps", "1", *lora)),
            ("split", ["export", "RUNS/full", "OUT", "--max-shard-size", "1MB"]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("taken", ["export", "RUNS/full", "RUNS/split"]),
            ("nothing", ["export", "RUNS/nothing", "OUT"]),
            ("asked", ["infer", "RUNS/full/checkpoint-1", "--prompt", "?"]),
            ("on a checkpoint", sft("--model", "RUNS/full/checkpoint-1")),
            ("on adapters", sft("--model", "RUNS/lora")),
            ("on a run", sft("--model", "RUNS/full")),
        ]
    )


@pytest.fixture(scope="module")
def more(exports, commands, sft):
    """More of the same runs."""
    full, lora = exports["full"].folder, exports["lora"].folder
    return commands(
        [
            ("half", ["export", str(lora), "OUT", "--dtype", "bf16"]),
            ("computed in bf16", sft("--model", "tiny", "--max-steps", "1", "--precision", "bf16")),
            ("as is", ["export", "RUNS/computed in bf16", "OUT"]),
            ("early", ["export", str(full / "checkpoint-1"), "OUT"]),
            ("late", ["export", str(lora / "checkpoint-2"), "OUT"]),
            ("embedded", sft("--model", "tiny", "--max-steps", "2", "--save-steps", "1")),
            ("of embedded", ["export", "RUNS/embedded/checkpoint-2", "OUT"]),
        ]
    )


@pytest.mark.slow
def test_masters_are_exported_as_they_are(more) -> None:
    """A run that computes in bf16 trains weights in fp32, and its config.json says what its files hold."""
    from safetensors.torch import load_file

    run, exported = more["computed in bf16"], more["as is"]
    assert (run.code, exported.code) == (0, 0), (run.output, exported.output)
    assert json.loads((run.folder / "model" / "config.json").read_text())["dtype"] == "float32"
    trained, taken = (load_file(folder / "model.safetensors") for folder in (run.folder / "model", exported.folder))
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert any(not value.equal(value.bfloat16().float()) for value in trained.values())
    assert all(taken[name].equal(value) for name, value in trained.items())


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_a_full_model_is_split_by_size(exports) -> None:
    """Into several files with an index, and is the same model."""
    run = exports["split"]
    assert run.code == 0, run.output
    assert "it computes the same logits" in run.output
    assert (run.folder / "model.safetensors.index.json").is_file()
    sizes = sorted(file.stat().st_size for file in run.folder.glob("*.safetensors"))
    assert len(sizes) > 2
    assert sizes[-2] < 1.1e6  # but for the embedding, which is larger by itself
    assert torch.equal(logits(run.folder), logits(exports["full"].folder / "model"))


def test_adapters_are_merged(exports, tiny: Path) -> None:
    """No adapter is left, and the logits are those of the model with its adapters, not those of the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = exports["merged"]
    assert run.code == 0, run.output
    assert not (run.folder / "adapter_config.json").exists()
    with_adapters = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny), exports["lora"].folder / "model"
    )
    with torch.no_grad():
        expected = with_adapters.eval()(input_ids=torch.arange(5, 25)[None]).logits
    got = logits(run.folder)
    assert (got - expected).abs().max() < 1e-4
    assert (got - logits(tiny)).abs().max() > 1e-2


def test_adapters_on_a_base_in_half_precision(exports, tmp_path: Path) -> None:
    """As models are published. What rounding moves is no sign of adapters that do not fit: merged is what fp32 gives,
    rounded once to the dtype of the base, or not at all."""
    import json

    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from shardproof.train.export import export

    adapter = exports["lora"].folder / "model"
    config = json.loads((adapter / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]).bfloat16()
    base.save_pretrained(tmp_path / "base")
    shutil.copytree(adapter, tmp_path / "run" / "model")
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "run" / "model" / "adapter_config.json").write_text(json.dumps(config))
    done = export(str(tmp_path / "run"), str(tmp_path / "as_is"))
    assert done.merged_error is not None
    assert done.merged_error < 1e-5
    export(str(tmp_path / "run"), str(tmp_path / "whole"), dtype="fp32")
    merged = PeftModel.from_pretrained(base.float(), adapter).merge_and_unload().state_dict()
    as_is, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("as_is", "whole"))
    for name, value in whole.items():
        torch.testing.assert_close(value, merged[name])
        assert torch.equal(as_is[name], value.bfloat16())


@pytest.mark.slow
def test_in_another_dtype(more) -> None:
    from safetensors.torch import load_file

    run = more["half"]
    assert run.code == 0, run.output
    assert {w.dtype for w in load_file(run.folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_checkpoint_of_a_run_with_an_attention_of_its_own_can_be_exported(commands, sft) -> None:
    """What is exported is loaded again with that of the model, and was compared with that of the run."""
    attention = ["--attn", "eager", "--packing", "--max-steps", "1", "--save-steps", "1"]
    runs = commands([("run", sft(*attention)), ("exported", ["export", "RUNS/run/checkpoint-1", "OUT"])])
    for run in runs.values():
        assert run.code == 0, run.output


@pytest.mark.slow
def test_a_checkpoint_can_be_exported(exports, more) -> None:
    """One from the middle of a run, and one of adapters."""
    for name in ("early", "late", "of embedded"):
        assert more[name].code == 0, more[name].output
    # A run of --model tiny that has ended keeps its own model only, which is of the same shape.
    assert torch.equal(logits(more["of embedded"].folder), logits(more["embedded"].folder / "model"))
    assert not torch.equal(logits(more["early"].folder), logits(exports["full"].folder / "model"))
    assert torch.equal(logits(more["late"].folder), logits(exports["merged"].folder))


def test_refusals(exports) -> None:
    assert exports["taken"].code == 2
    assert "exists already" in exports["taken"].output
    assert exports["nothing"].code == 2
    assert "There is no run folder" in exports["nothing"].output


@pytest.mark.parametrize(
    "name, advice",
    [
        ("asked", "shardproof export {full}/checkpoint-1 FOLDER, then name FOLDER"),
        ("on a checkpoint", "shardproof export {full}/checkpoint-1 FOLDER, then --model FOLDER"),
        ("on adapters", "shardproof export {lora} FOLDER, then --model FOLDER"),
        ("on a run", "Its model is --model {full}/model"),
    ],
)
def test_where_a_model_is_wanted_a_run_or_checkpoint_says_what_to_name(exports, name: str, advice: str) -> None:
    assert exports[name].code == 2
    folders = {run: exports[run].folder for run in ("full", "lora")}
    assert advice.format(**folders) in exports[name].output


def test_whoever_may_read_the_config_may_read_the_weights(exports) -> None:
    """A server of another user loads a model: safetensors 0.8 writes files for their owner only."""
    for folder, config in (
        (exports["merged"].folder, "config.json"),
        (exports["lora"].folder / "model", "adapter_config.json"),
        (exports["full"].folder / "model", "config.json"),
    ):
        weights = list(folder.glob("*.safetensors"))
        assert weights
        assert {file.stat().st_mode for file in weights} == {(folder / config).stat().st_mode}


def test_a_size_without_a_unit_is_refused(tmp_path: Path) -> None:
    from shardproof.cli.export import run
    from shardproof.errors import ConfigError

    with pytest.raises(ConfigError, match=r"max-shard-size many: .*such as 500MB"):
        run([str(tmp_path), str(tmp_path / "out"), "--max-shard-size", "many"])


def adapted(base: Path, folder: Path, *targets: str, **more: Any) -> Path:
    """Adapters with values of their own on the model in `base`; trained tokens are others, too."""
    from peft import LoraConfig, get_peft_model

    from shardproof.models.loading.classes import load_pretrained

    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=list(targets or ("q_proj", "v_proj")), init_lora_weights=False, **more)
    model = get_peft_model(load_pretrained(str(base)), config)
    for name, p in model.named_parameters():
        if "trainable_tokens_delta" in name:
            p.data.normal_()
    model.save_pretrained(folder)
    return folder


def experts(tiny: Path, folder: Path) -> Path:
    """A mixture of experts with the tokenizer of `tiny`."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["tied", "experts", "omni"])
def test_what_is_exported_is_the_same_model(tiny: Path, tiny_models, tmp_path: Path, kind: str, lora: bool) -> None:
    """Tied weights are there once, experts one by one, and of an omni model the talker too; with adapters merged."""
    from safetensors.torch import load_file

    from shardproof.models.loading.classes import load_pretrained
    from shardproof.train.export import export
    from shardproof.train.model.loading import load_processing
    from shardproof.train.options.config import SftConfig

    base = tiny if kind == "tied" else tiny_models("qwen2_5_omni") if kind == "omni" else experts(tiny, tmp_path / "b")
    run = adapted(base, tmp_path / "run") if lora else base
    if lora:
        load_processing(str(base), SftConfig()).save_pretrained(run)
    done = export(str(run), str(tmp_path / "out"), max_shard_size="20KB")
    assert done.files > 1
    assert (done.merged_error is not None) is lora
    names = [name for file in done.folder.glob("*.safetensors") for name in load_file(file)]
    assert len(names) == len(set(names))
    originals = {name for file in base.glob("*.safetensors") for name in load_file(file)}
    assert set(names) == originals
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        got, first = (load_pretrained(str(folder)).eval()(input_ids=ids).logits for folder in (done.folder, base))
    assert torch.equal(got, first) is not lora


def test_tensors_that_are_merged_have_the_dtype_of_their_base(tiny: Path, tmp_path: Path) -> None:
    """As of gpt-oss, whose experts are two tensors in one module: PEFT wraps it once for each that has adapters."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.train.export import export

    folder = experts(tiny, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    both = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=both, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "run")
    done = export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert {value.dtype for value in load_file(done.folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["tied", "dora", "tokens", "experts"])
def test_where_memory_is_scarce_layers_are_merged_one_by_one(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Without the whole model in fp32: the same bits, and nothing compared, which is said."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.train import merging
    from shardproof.train.export import export

    base = experts(tiny, tmp_path / "base") if kind == "experts" else tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base if kind == "experts" else tiny, dtype=torch.bfloat16).save_pretrained(
        base
    )
    more: dict[str, Any] = {
        "tied": {"modules_to_save": ["norm"]},
        "dora": {"use_dora": True},
        "tokens": {"trainable_token_indices": [3, 4]},
        "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    }[kind]
    run = adapted(base, tmp_path / "run", *(("q_proj", "embed_tokens") if kind == "tied" else ("q_proj",)), **more)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(run)
    whole = export(str(run), str(tmp_path / "whole"))
    assert whole.merged_error is not None
    assert not caplog.text
    with mock.patch.object(merging, "host_memory", return_value=1000):
        each = export(str(run), str(tmp_path / "each"))
    one_by_one = (
        kind != "tokens"
    )  # tokens of tied weights are trained in both places, which only the logits can tell of
    assert (each.merged_error is None) is one_by_one
    assert ("layer by layer" in caplog.text) is one_by_one
    first, second = (load_file(done.folder / "model.safetensors") for done in (whole, each))
    assert first.keys() == second.keys()
    assert {value.dtype for value in second.values()} == {torch.bfloat16}
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "asked", "told"), [("qwen2_vl", 3136, 3136), ("qwen2_vl", 9, 784), ("llava", 9, None)]
)
def test_the_exported_processor_scales_pictures_down_as_the_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, asked: int, told: int | None
) -> None:
    """Or the command says that it has no field for that; no picture of these is smaller than 784 pixels."""
    from PIL import Image

    from models.tiny_folders import build
    from shardproof.cli.export import run
    from shardproof.models.loading.processors import load_processor

    build(kind, tmp_path / "run" / "model")
    (tmp_path / "run" / "config.yaml").write_text(f"max_pixels: {asked}\n")
    assert run([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    if told is None:
        assert "no pixel limit to hold the run's --max-pixels 9" in printed
        return
    assert f"images: the processor scales them down to {told:,} pixels" in printed
    images = load_processor(str(tmp_path / "out")).image_processor
    assert images([Image.new("RGB", (200, 200))], return_tensors="pt")["image_grid_thw"].prod() * 14 * 14 <= told


def exported_beside(base: Path, run: Path, out: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What is exported of adapters on `base`, its logits, and those of the model with adapters."""
    from peft import PeftModel

    from shardproof.models.loading.classes import load_pretrained
    from shardproof.train.export import export
    from shardproof.train.model.loading import load_processing
    from shardproof.train.options.config import SftConfig

    load_processing(str(base), SftConfig()).save_pretrained(run)
    done = export(str(run), str(out))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(load_pretrained(str(base)), run).eval()(input_ids=ids).logits
        exported = load_pretrained(str(done.folder)).eval()
        return exported, exported(input_ids=ids).logits, expected


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("targets", "tokens"),
    [
        (("lm_head",), None),
        (("q_proj", "embed_tokens"), None),
        (("lm_head", "embed_tokens"), None),
        (("q_proj",), {"lm_head": [5, 9]}),
        (("q_proj",), {"lm_head": [5, 9], "embed_tokens": [6, 9]}),
    ],
)
def test_adapters_on_one_end_of_tied_weights_leave_the_other_as_it_is(
    tiny: Path, tmp_path: Path, targets: tuple[str, ...], tokens: dict[str, list[int]] | None
) -> None:
    """The exported head has a weight of its own then, and the logits are those of the model with adapters."""
    run = adapted(tiny, tmp_path / "run", *targets, trainable_token_indices=tokens)
    exported, found, expected = exported_beside(tiny, run, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not exported.config.tie_word_embeddings
    assert exported.lm_head.weight is not exported.model.embed_tokens.weight


@pytest.mark.sampled
@pytest.mark.parametrize(
    "more",
    [{"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, {"trainable_token_indices": [5, 9]}],
)
def test_those_that_peft_ties_are_exported(tiny: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """It added adapters of both ends to the one weight of both."""
    targets = more.pop("target_modules", ["q_proj"])
    run = adapted(tiny, tmp_path / "run", *targets, **more)
    exported, found, expected = exported_beside(tiny, run, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert exported.config.tie_word_embeddings == ("trainable_token_indices" in more)


def test_so_they_do_in_half_precision(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.train.export import export

    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    run = adapted(tmp_path / "base", tmp_path / "run", "embed_tokens")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(run)
    done = export(str(run), str(tmp_path / "out"))
    values = load_file(done.folder / "model.safetensors")
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    assert not torch.equal(values["lm_head.weight"], values["model.embed_tokens.weight"])


@pytest.fixture(scope="module")
def judges(commands, tiny: Path, tmp_path_factory: pytest.TempPathFactory):
    """Reward models, full and as adapters, a run of DPO, and what is exported of them."""
    pairs = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    row = '{"query": "%d + 1", "response": "%d", "rejected_response": "none"}\n'
    pairs.write_text("".join(row % (i, i + 1) for i in range(8)))
    saved = ["--max-steps", "2", "--save-steps", "1", "--learning-rate", "1e-2", "--output-dir", "OUT"]
    rlhf = ["rlhf", "--model", str(tiny), "--dataset", str(pairs), *saved]
    return commands(
        [
            ("full", [*rlhf, "--rlhf-type", "rm"]),
            ("lora", [*rlhf, "--rlhf-type", "rm", "--tuner", "lora"]),
            ("dpo", [*rlhf, "--tuner", "lora"]),
            ("of full", ["export", "RUNS/full", "OUT"]),
            ("of lora", ["export", "RUNS/lora", "OUT"]),
            ("of checkpoint", ["export", "RUNS/lora/checkpoint-2", "OUT"]),
            ("of dpo", ["export", "RUNS/dpo/checkpoint-2", "OUT"]),
            ("asked", ["infer", "RUNS/full", "--prompt", "hello"]),
        ]
    )


@pytest.mark.slow
def test_a_reward_model_keeps_its_head(judges) -> None:
    """Exported as what it is: the head that was trained, full, merged, and from a checkpoint."""
    from transformers import AutoModelForSequenceClassification

    def reward(folder: Path) -> torch.Tensor:
        model, said = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not said["missing_keys"]
        with torch.no_grad():
            return model.eval()(input_ids=torch.arange(5, 25)[None]).logits

    for name in ("of full", "of lora", "of checkpoint", "of dpo"):
        assert judges[name].code == 0, judges[name].output
    assert torch.equal(reward(judges["of full"].folder), reward(judges["full"].folder / "model"))
    assert torch.allclose(reward(judges["of checkpoint"].folder), reward(judges["of lora"].folder), atol=1e-6)
    assert judges["asked"].code == 2
    assert "scores answers" in judges["asked"].output


def test_where_tensors_lie_in_a_file_does_not_make_it_another_model(tmp_path: Path) -> None:
    """A head on one token is a product with one row, whose last bits go by where its weights begin in memory."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    from shardproof.models.tiny import train_tokenizer
    from shardproof.train.export import export

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = train_tokenizer(["of each a label"])
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for labels in (2, 3, 4):  # by so many numbers the biases before the head move it
        run = tmp_path / f"run-{labels}"
        base = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=labels)
        how = LoraConfig(r=2, task_type="SEQ_CLS", modules_to_save=["bert.pooler.dense"], init_lora_weights=False)
        get_peft_model(base, how).save_pretrained(run)
        tokenizer.save_pretrained(run)
        (run / "labels.json").write_text(json.dumps({"id2label": {str(i): f"L{i}" for i in range(labels)}}))
        assert export(str(run), str(tmp_path / f"out-{labels}")).merged_error is not None


def test_layers_that_share_a_weight_cannot_have_adapters_merged(tiny: Path, tmp_path: Path, caplog) -> None:
    """Zamba2 has one block in several places: no weight is what it is with the adapters of each."""
    from transformers import AutoTokenizer, Zamba2Config, Zamba2ForCausalLM

    from shardproof.errors import ConfigError
    from shardproof.train.adapters.adding import check_named_parts
    from shardproof.train.export import export
    from shardproof.train.options.config import SftConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    mamba = {"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 16}
    layers = {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "attention_head_dim": 16}
    config = Zamba2Config(vocab_size=len(tokenizer), intermediate_size=48, **sizes, **mamba, **layers)
    Zamba2ForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run = adapted(tmp_path / "base", tmp_path / "run", "q_proj", "down_proj")
    tokenizer.save_pretrained(run)
    with pytest.raises(ConfigError, match=r"1\.shared_.* and .*3\.shared_.* share one weight but have adapters of"):
        export(str(run), str(tmp_path / "out"))
    told = r"1\.shared_.*q_proj and .*3\.shared_.*q_proj share one weight and get adapters of their own"
    for targets, count in ((["q_proj"], 1), (["in_proj"], 0)):
        caplog.clear()
        check_named_parts(str(tmp_path / "base"), SftConfig(model="m", tuner="lora", target_modules=targets))
        assert len(re.findall(told, caplog.text)) == count


def test_adapters_are_no_model(tmp_path: Path) -> None:
    from shardproof.errors import ConfigError
    from shardproof.train.model.loading import check_model_source
    from shardproof.train.model.reward_models import judges

    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    assert judges(tmp_path)
    with pytest.raises(ConfigError, match="shardproof export"):
        check_model_source(str(tmp_path), "--reward-model")
    (tmp_path / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    assert not judges(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint-1", "model"])
def test_a_base_that_is_gone_is_named(tmp_path, tiny: Path, commands, sft, what: str) -> None:
    """A checkpoint holds what was trained and not the model's config; adapters do not hold the model."""
    from shardproof.errors import ConfigError
    from shardproof.train.adapters.begun import begun
    from shardproof.train.answers.chat import Chat
    from shardproof.train.export import export
    from shardproof.train.options.config import SftConfig

    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    tuner = ["--tuner", "lora"] if what == "model" else []
    run = commands([("run", sft("--model", str(base), "--max-steps", "1", "--save-steps", "1", *tuner))])["run"]
    assert run.code == 0, run.output
    shutil.rmtree(base)
    said_in = run.folder / ("config.yaml" if what == "checkpoint-1" else "model/adapter_config.json")
    gone = pytest.raises(ConfigError, match=rf"needs .*base, the model that it was trained from, .*\n.* into {said_in}")
    with gone:
        export(str(run.folder / what), str(tmp_path / "out"))
    if what == "model":
        with gone:
            Chat(run.folder / what)
        with gone:
            begun(SftConfig(adapters=str(run.folder)))
        asked = commands([("asked", ["infer", str(run.folder), "--prompt", "the"])])["asked"]
        assert asked.code == 2
        assert "the model that it was trained from, but it is gone." in " ".join(asked.output.split())
    said_in.write_text(said_in.read_text().replace(str(base), str(tiny)))
    assert export(str(run.folder / what), str(tmp_path / "out")).files == 1


def test_a_folder_behind_a_link_is_written_to_and_a_mount_point_refused(
    tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    """Both were found out once all was written."""
    from shardproof.errors import ConfigError
    from shardproof.train.export import export

    (tmp_path / "disk").mkdir()
    for name in ("disk", "not there yet"):
        (tmp_path / f"link to {name}").symlink_to(name)
        export(str(tiny), str(tmp_path / f"link to {name}"))
        assert (tmp_path / name / "config.json").is_file()
        assert (tmp_path / f"link to {name}").is_symlink()
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "mounted")
    with pytest.raises(ConfigError, match="is a mount point"):
        export(str(tiny), str(tmp_path / "mounted"))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "LORA"])
def test_what_cannot_be_merged_is_refused(tiny: Path, tmp_path: Path, kind: str) -> None:
    """Prompts that are learnt, and adapters that wait for a token (aLoRA), ended in errors of Python."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.errors import ConfigError
    from shardproof.train.export import export

    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    waiting = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5])
    made = prompt if kind == "PROMPT_TUNING" else waiting
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), made).save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"{kind}\) .*cannot be merged into its weights.*`infer` and PEFT load them"):
        export(str(tmp_path / "run"), str(tmp_path / "out"))
