"""Promise: without its padding a batch has the loss and the gradients that it has with it, and a model for which it has
others is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.media.batches import MediaCollator
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.models.attention.padding_free import PaddingFree, check_padding_free
from shardproof.models.families.known import family_of
from shardproof.train.callbacks import Tries
from shardproof.train.model.loading import load_model, load_processing
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft
from train.test_families import MEDIA, ROWS

pytestmark = pytest.mark.slow

OMNI, SPATIAL = "qwen2_5_omni", "qwen2_vl"
CARRIES = "minicpmv4_6"  # its layers carry a state from token to token
REFUSED = ["gemma3"]  # its masks are made before its decoder
FREE = [*(kind for kind in MEDIA if kind not in REFUSED), CARRIES]
FEW = [OMNI, SPATIAL, CARRIES]
WORDS = torch.arange(5, 13)


def loaded(folder: Path, **options: Any) -> tuple[Any, Any]:
    config = SftConfig(model=str(folder), padding_free=True, workers=0, dataset=[""], **options)
    return config, load_model(config.model, config)


def hooks_of(model: Any) -> PaddingFree:
    return model.get_decoder().padding_free


def compare(model: Any, inputs: dict[str, Any]) -> None:
    hooks, found = hooks_of(model), []
    check_padding_free(model, WORDS)
    for hooks.on in (False, True):
        model.zero_grad()
        used = hooks.used
        outputs = model(**inputs, use_cache=False)
        assert hooks.used == used + hooks.on
        outputs.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((outputs.loss.detach(), outputs.logits[inputs["attention_mask"].bool()].detach(), gradients))
    (loss, logits, expected), (free, got, gradients) = found
    torch.testing.assert_close(free, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-3)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        most = max(1e-3, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient / most, expected[name] / most, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(k, marks=pytest.mark.slow) for k in FREE if k not in FEW)])
def test_rows_with_files_are_what_they_are_with_padding(tiny_models, files: Path, kind: str) -> None:
    rows = [row for media in ("text", *family_of({"model_type": kind}).media) for row in ROWS[media]]
    file = files / f"free-{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, model = loaded(tiny_models(kind), max_length=400)
    processing = load_processing(config.model, config)
    encoded = sft.encode(config, read_rows([str(file)]), processing)
    inputs = MediaCollator(sft.media_encoder(config, processing))([encoded[i] for i in range(len(encoded))])
    assert not inputs["attention_mask"].all()
    compare(model, inputs)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_may_stand_on_either_side(tiny: Path, side: str) -> None:
    _, model = loaded(tiny)
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if side != "right":
        mask[0, :5] = mask[1, :1] = 0
    if side != "left":
        mask[0, 9:] = mask[2, 2:] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.masked_fill(counted.eq(0) | mask.eq(0), -100)  # padding would predict a row's first token
    compare(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    compare(model, {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": counted})


def test_what_is_not_a_padded_batch_is_left_alone(tiny: Path) -> None:
    _, model = loaded(tiny)
    hooks, ids = hooks_of(model.eval()), torch.arange(5, 13).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.no_grad():
        model(input_ids=ids)
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
        model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(4).expand(2, -1) * 3)
        written = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert hooks.used == 0
    hooks.on = False
    assert model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False).equal(written)
    assert hooks._entered == []


def test_the_scores_of_experts_are_those_of_rows() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from shardproof.models.attention.padding_free import make_padding_free
    from shardproof.models.attention.varlen import take_for_packed

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=64, num_hidden_layers=2, head_dim=8, **shape, **experts)
    model = Qwen3MoeForCausalLM(config)
    take_for_packed(model, half=False)
    make_padding_free(model)
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 3:] = 0
    compare(model, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)})


def test_a_model_that_makes_something_else_of_it_is_refused(tiny: Path, monkeypatch) -> None:
    from shardproof.models.attention import padding_free

    _, model = loaded(tiny)
    check_padding_free(model.train(), WORDS)

    def without_mask(module: Any, args: Any, given: dict[str, Any]) -> Any:
        return args, {**given, "attention_mask": None}

    handle = model.get_decoder().register_forward_pre_hook(without_mask, with_kwargs=True, prepend=True)
    with handle, pytest.raises(ConfigError, match="does not give its decoder a mask of padding"):
        check_padding_free(model, WORDS)

    lay_out = padding_free.laid_out

    def as_one_row(args: Any, given: Any, rows: Any, places: Any, positions: Any, in_space: bool) -> Any:
        return lay_out(args, given, rows, places, torch.arange(positions.numel())[None], in_space)

    monkeypatch.setattr(padding_free, "laid_out", as_one_row)
    with pytest.raises(ConfigError, match=r"do not get the results that they get in separate rows"):
        check_padding_free(model, WORDS)
    assert hooks_of(model).on
    assert model.training


def test_it_is_tried_on_tokens_that_the_tokenizer_has(tiny: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<pad>": 0, "A": 2, "C": 3, "G": 4, "T": 5}))  # of all else it makes an error
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    _, model = loaded(tiny)
    bases = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    Tries(check_padding_free).on_train_begin(model=model, processing_class=bases)
    assert hooks_of(model).used == 1


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_attention_that_compares_all_tokens_is_refused(tiny: Path, tiny_models, attn: str) -> None:
    with pytest.raises(ConfigError, match=f"{attn} attention of .* would compare all of their tokens"):
        loaded(tiny, attn=attn)
    with pytest.raises(ConfigError, match="of Gemma3ForConditionalGeneration would compare"):
        loaded(tiny_models(REFUSED[0]))


def test_what_to_do_is_what_the_model_can() -> None:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        FalconConfig,
        FalconForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
    )

    from shardproof.models.attention.padding_free import make_padding_free

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    with pytest.raises(ConfigError, match=r"transformers has no other for it: leave --padding-free out\."):
        make_padding_free(BloomForCausalLM(BloomConfig(**shape)))
    few = {"num_local_experts": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
    with pytest.raises(ConfigError, match=r"\nAdd --attn varlen \(on a GPU with --precision bf16 or fp16\), or leave"):
        make_padding_free(GptOssForCausalLM(GptOssConfig(**shape, **few)))
    with pytest.raises(ConfigError, match=r"\nAdd --attn flash_attention_2, or leave"):  # has a list of attentions
        make_padding_free(FalconForCausalLM(FalconConfig(**shape)))


@pytest.fixture(scope="module")
def runs(commands, sft: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    labelled = tmp_path_factory.mktemp("rows") / "labels.jsonl"
    rows = [{"query": "a process sends " * (i % 5 + 1), "label": i % 2} for i in range(16)]
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    embedded = labelled.with_name("pairs.jsonl")
    rows = [{"query": "the rank " * (i % 4 + 1), "response": "holds a step " * (i % 5 + 1)} for i in range(16)]
    embedded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {
        "rows": [],
        "adapters": ["--tuner", "lora"],
        "chunked": ["--chunked-loss"],
        "labels": ["--task", "seq_cls", "--num-labels", "2", "--dataset", str(labelled)],
        "embedded": ["--task", "embedding", "--dataset", str(embedded)],
    }
    plan = []
    for name, words in tasks.items():
        words = [*words, "--max-steps", "3", "--global-batch-size", "8"]
        ranks = "2" if name == "embedded" else "1"  # a text is told apart from those of its micro-batch
        plan.append((name, sft(*words, "--nproc", ranks, "--stage", "0", "--attn", "sdpa")))
        many = ["--nproc", "2", "--stage", "3", "--gradient-checkpointing"]
        plan.append((f"{name}, free", sft(*words, *many, "--padding-free")))
    plan.append(("refused", sft("--padding-free", "--attn", "sdpa")))
    return commands(plan)


def test_runs_have_the_losses_of_padded_ones(runs) -> None:
    for name, run in runs.items():
        if name == "refused":
            assert run.code == 2
            assert "Add --attn varlen" in run.output
        elif not name.endswith("free"):
            free = runs[f"{name}, free"]
            assert [run.code, free.code] == [0, 0], run.output + free.output
            assert free.series("loss") == pytest.approx(run.series("loss"), abs=2e-5), name
            assert len(run.series("loss")) == 3
