"""--freeze-parameters, --trainable-parameters and --neftune-noise-alpha: who is trained, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.train.model.parts import choose_parts
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe
from zero.language_models import tiny as small

pytestmark = pytest.mark.slow

NAMED: Any = {"model": "tiny", "dataset": ["stdlib"]}


@pytest.fixture(scope="module")
def runs(commands, sft):
    some = ["--freeze-parameters", r"layers\.0\.", "norm", "--trainable-parameters", r"layers\.0\.self_attn\.q_proj"]
    noise = ["--neftune-noise-alpha", "50"]
    one = ["--nproc", "1", "--per-device-batch-size", "8"]
    return commands(
        [
            ("one", sft(*some, *one)),
            ("two", sft(*some, "--nproc", "2", "--stage", "3")),
            ("quiet", sft("--nproc", "2", "--stage", "0")),
            ("noisy0", sft(*noise, "--nproc", "2", "--stage", "0")),
            ("noisy3", sft(*noise, "--nproc", "2", "--stage", "3")),
            ("none", sft("--freeze-parameters", "nowhere")),
        ]
    )


def test_only_what_is_named_moves(runs, tiny: Path) -> None:
    before = load_file(tiny / "model.safetensors")
    for name in ("one", "two"):
        assert runs[name].code == 0, runs[name].output
        after = load_file(runs[name].folder / "model" / "model.safetensors")
        moved = {key for key, value in before.items() if not value.equal(after[key])}
        frozen = {k for k in before if ("layers.0." in k and "self_attn.q_proj" not in k) or "norm" in k}
        assert frozen
        assert moved == before.keys() - frozen
    assert runs["two"].series("loss") == pytest.approx(runs["one"].series("loss"), rel=1e-5)


def test_noise_on_embeddings_is_that_of_a_seed_at_each_stage(runs) -> None:
    quiet, noisy, sharded = (runs[name].series("loss") for name in ("quiet", "noisy0", "noisy3"))
    assert noisy == pytest.approx(sharded, rel=1e-5)
    assert abs(noisy[0] - quiet[0]) > 1e-3


def test_a_name_that_nothing_has(runs) -> None:
    assert runs["none"].code == 2
    assert "--freeze-parameters nowhere: the model has no parameter with such a name." in runs["none"].output


@pytest.mark.parametrize(
    "options, said",
    [
        ({"freeze_parameters": ["("]}, "is not a regular expression"),
        ({"trainable_parameters": ["lm_heads"]}, "no parameter with such a name"),
        ({"freeze_parameters": ["."]}, "nothing is left to train"),
    ],
)
def test_names_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_parts(small("Llama"), SftConfig(**options))


def test_a_tied_weight_has_both_names() -> None:
    model = small("Llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    choose_parts(model, SftConfig(freeze_parameters=["lm_head"]))
    assert not model.model.embed_tokens.weight.requires_grad


def test_a_part_of_what_is_frozen() -> None:
    model = small("Llama")
    choose_parts(model, SftConfig(freeze=["llm"], trainable_parameters=["lm_head"]))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["lm_head.weight"]


@pytest.mark.parametrize("options", [{"neftune_noise_alpha": 5.0}, {"tuner": "lora", "lora_dropout": 0.1}])
def test_noise_is_not_the_same_on_other_numbers_of_processes(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="each process draws its own random numbers"):
        recipe.check(SftConfig(**NAMED, deterministic=True, **options), 1)


def test_they_are_not_for_adapters() -> None:
    with pytest.raises(ConfigError, match="--freeze-parameters needs --tuner full"):
        recipe.check(SftConfig(**NAMED, tuner="lora", freeze_parameters=["norm"]), 1)
