"""What a run refuses, and in how many words: found before training, said once, exit code 2."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError


@pytest.fixture(scope="module")
def refused(commands, sft, tiny: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    models = ("plain", "broken", "dumb", "endless")
    for name in models:
        shutil.copytree(tiny, folder / name)
    (folder / "plain" / "chat_template.jinja").unlink()
    (folder / "broken" / "model.safetensors").write_bytes(b"not weights")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "dumb" / file).unlink()
    config = json.loads((folder / "dumb" / "config.json").read_text())
    config.pop("model_type")
    (folder / "dumb" / "config.json").write_text(json.dumps(config))
    words = json.loads((folder / "endless" / "tokenizer_config.json").read_text())
    words = {name: value for name, value in words.items() if name not in ("pad_token", "eos_token")}
    (folder / "endless" / "tokenizer_config.json").write_text(json.dumps(words))
    pairs = folder / "pairs.jsonl"
    long = folder / "long.jsonl"
    long.write_text(json.dumps({"query": "a " * 500, "response": "b"}) + "\n")
    pairs.write_text('{"query": "1 + 1", "response": "2", "rejected_response": "3"}\n' * 8)

    def preferred(*more: str) -> list[str]:
        fixed = ["rlhf", "--model", str(tiny), "--dataset", str(pairs), "--nproc", "2", "--output-dir", "OUT"]
        return [*fixed, *more]

    return commands(
        [
            *(
                (name, sft("--model", str(folder / name), "--nproc", "2"))
                for name in ("plain", "broken", "dumb", "endless")
            ),
            ("targets", sft("--tuner", "lora", "--target-modules", "nonesuch", "--nproc", "2")),
            ("saved", sft("--tuner", "lora", "--modules-to-save", "lm_haed", "--nproc", "2")),
            ("one", sft("--tuner", "lora", "--target-modules", "v_proj", "q_prj", "--nproc", "2")),
            ("parts", sft("--train-parts", "vision", "--nproc", "2")),
            ("preferred", preferred("--rlhf-type", "rm", "--tuner", "lora", "--target-modules", "nonesuch")),
            ("long", sft("--max-length", "4", "--nproc", "2")),
            ("evaluated", sft("--val-dataset", str(long), "--max-length", "256")),
            ("flex", sft("--attn", "flex_attention", "--nproc", "2")),
            ("flash", sft("--attn", "flash_attention_2", "--nproc", "2")),
            ("split", sft("--val-split", "0.999")),
        ]
    )


@pytest.mark.parametrize("name", ["targets", "one", "parts", "preferred"])
def test_parts_that_are_not_there_are_found_before_rows_are_encoded(refused, name: str) -> None:
    assert "encoded" not in refused[name].output


@pytest.mark.parametrize(
    "name, text",
    [
        ("plain", "--chat-template"),
        ("broken", "not a safetensors file"),
        ("dumb", "tokenizer"),
        ("endless", "neither a padding token nor an end-of-text token. Set its pad_token."),
        ("targets", "--target-modules nonesuch"),
        ("saved", "--modules-to-save lm_haed: the model has no module of that name. Did you mean lm_head?"),
        ("one", "--target-modules q_prj: the model has no module of that name. Did you mean q_proj?"),
        ("parts", "--train-parts vision: this model has no such part"),
        ("preferred", "--target-modules nonesuch"),
        ("long", "--max-length 4"),
        ("evaluated", "error: Rows to evaluate on: Every row is longer than --max-length 256"),
        pytest.param(
            *("flex", "--attn flex_attention: torch has no backward pass for it on a CPU"),
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU has it"),
        ),
        pytest.param(
            *("flash", "flash_attention_2 needs the package flash-attn (or kernels). --attn varlen does the same"),
            marks=pytest.mark.skipif(any(map(find_spec, ("flash_attn", "kernels"))), reason="it is here"),
        ),
        ("split", "hold out"),
    ],
)
def test_one_message_of_a_few_lines(refused, name: str, text: str) -> None:
    run = refused[name]
    assert run.code == 2, run.output
    lines = [line for line in run.output.splitlines() if not line.startswith("  ")]  # the summary is indented
    assert text in "\n".join(lines)
    assert len(lines) <= 4, run.output
    assert run.output.count("error") == 1
    assert not run.folder.exists()


def test_a_media_root_in_which_nothing_can_lie(tmp_path: Path) -> None:
    """Told once, and not of every row."""
    from shardproof.errors import ConfigError
    from shardproof.train.options.config import SftConfig
    from shardproof.train.sft import recipe as sft

    named: dict[str, Any] = {"model": "tiny", "dataset": ["stdlib"]}
    (tmp_path / "a.png").touch()
    for root, text in (
        ("a.png", "a.png is a file.\nName the folder"),
        ("b/c", f"does not exist: there is {tmp_path}."),
    ):
        with pytest.raises(ConfigError) as caught:
            sft.check(SftConfig(media_root=str(tmp_path / root), **named), 1)
        assert text in str(caught.value)
    sft.check(SftConfig(media_root=str(tmp_path), **named), 1)


@pytest.mark.parametrize(
    "family, options, words",
    [
        ("Gemma2", {"attn": "varlen"}, "--attn varlen: Gemma2ForCausalLM changes scores"),
        ("Gemma2", {"attn": "sdpa"}, "does not support an attention implementation"),
        ("Lfm2", {"packing": True, "compile": True}, "--packing with --compile: layers of Lfm2ForCausalLM"),
    ],
)
def test_what_a_model_is_not_made_for_is_refused_before_rows_are_encoded(
    tmp_path: Path, family: str, options: dict[str, Any], words: str
) -> None:
    import transformers

    from shardproof.train.adapters.adding import check_named_parts
    from shardproof.train.options.config import SftConfig

    layers = {"layer_types": ["conv", "full_attention"]} if family == "Lfm2" else {}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**shape, **heads)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_named_parts(str(tmp_path), SftConfig(model=str(tmp_path), dataset=["x"], **options))


def test_a_first_line_that_ends_in_a_colon_goes_on() -> None:
    """Gemma 3n's vision tower wants timm: "You can install it with pip:" was the end of what was said."""
    from shardproof.train.model.loading import first_line

    said = "\nTimmWrapperModel requires timm. You can install it with pip:\n`pip install timm`. Then restart.\n"
    assert first_line(ImportError(said)).endswith("install it with pip: `pip install timm`. Then restart.")
    assert first_line(ValueError("no:\n")) == "no:"
    assert first_line(ValueError("one\ntwo")) == "one"
