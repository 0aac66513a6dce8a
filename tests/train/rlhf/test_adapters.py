"""A run of `shardproof rlhf` that trains adapters on: what it leaves, and what its checkpoints are good for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.adapters.adding import check_named_parts, with_adapters
from shardproof.train.adapters.begun import begun, check_reference
from shardproof.train.adapters.reference import REFERENCE, refer_to
from shardproof.train.options.rlhf_config import RlhfConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on the embedding, too, whose values PEFT keeps in places of their own, and norms that are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    places = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["input_layernorm"]}
    made = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **places)
    folder = tmp_path_factory.mktemp("embedded")
    get_peft_model(AutoModelForCausalLM.from_pretrained(models["policy"]), made).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(
    commands: Any, models: dict[str, Path], files: dict[str, Path], adapters: None, embedded: Path
) -> dict[str, Any]:
    named, rows = models["policy"].with_name("adapters"), str(files["pairs"])
    short = ["--learning-rate", "1e-3", "--global-batch-size", "4", "--max-steps", "4", "--save-steps", "2"]
    on = ["rlhf", "--adapters", str(named), "--dataset", rows, *short, "--output-dir", "OUT"]
    two = ["--nproc", "2", "--stage", "3"]
    new = ["rlhf", "--model", str(models["policy"]), "--dataset", rows]
    return commands(
        [
            ("run", [*on, *two]),
            ("resumed", [*on, "--nproc", "1", "--stage", "1", "--resume", "RUNS/run/checkpoint-2"]),
            ("whole", ["export", "RUNS/run", "OUT"]),
            ("last", ["export", "RUNS/run/checkpoint-4", "OUT"]),
            ("alone", [*on, "--max-steps", "1", "--ref-adapters", "none"]),
            ("once", [*on, "--max-steps", "1", "--ref-adapters", "none", "--precompute-ref", "--save-only-model"]),
            ("embedded", ["rlhf", "--adapters", str(embedded), *on[3:], "--max-steps", "1", *two]),
            ("new", [*new, "--tuner", "lora", "--ref-adapters", "none"]),
            ("rm", [*on, "--rlhf-type", "rm"]),
            ("nowhere", [*on, "--ref-adapters", "nowhere"]),
            ("cpo", [*on, "--rlhf-type", "cpo", "--ref-adapters", "none"]),
        ]
    )


@pytest.mark.slow
def test_it_goes_on_on_other_processes(runs: dict[str, Any]) -> None:
    for name in ("run", "resumed", "alone"):
        assert runs[name].code == 0, runs[name].output
    assert runs["resumed"].series("loss") == pytest.approx(runs["run"].series("loss")[2:], abs=1e-5)
    assert runs["alone"].series("rewards/margins") != [0.0]


def test_the_reference_has_the_adapters_that_it_is_to_have(runs: dict[str, Any]) -> None:
    """TRL copies those that are trained, but for those of embeddings; --precompute-ref asked that copy."""
    for name in ("alone", "once", "embedded"):
        assert runs[name].code == 0, runs[name].output
    assert runs["once"].series("loss") == pytest.approx(runs["alone"].series("loss"), abs=1e-6)
    assert runs["alone"].series("loss") != pytest.approx([math.log(2)], abs=1e-4)
    assert runs["embedded"].series("loss") == pytest.approx([math.log(2)], abs=1e-6)


def test_the_reference_is_no_part_of_what_comes_out(runs: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    assert not [path.name for path in (runs["run"].folder / "model").iterdir() if path.is_dir()]
    whole, last = (AutoModelForCausalLM.from_pretrained(runs[name].folder) for name in ("whole", "last"))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, last(ids).logits)


def test_what_means_nothing_is_refused(runs: dict[str, Any]) -> None:
    for name, text in {
        "new": "--ref-adapters is for adapters whose training continues: add --adapters.",
        "rm": "belong to a model for CAUSAL_LM, but this run trains one for SEQ_CLS",
        "cpo": "--ref-adapters",
        "nowhere": "--ref-adapters nowhere: there is no such folder.",
    }.items():
        assert runs[name].code == 2, runs[name].output
        assert text in " ".join(runs[name].output.split())


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], [".*(q_proj|lm_head)"]])
def test_adapters_that_trl_would_not_see_are_refused_before_ranks_start(models: dict[str, Path], targets: Any) -> None:
    """It multiplies by the weight of the head, and refused them when all ranks were there."""
    config = RlhfConfig(rlhf_type="dpo", tuner="lora", dora=True, target_modules=targets)
    with pytest.raises(ConfigError, match=r"the weight of the head, lm_head, .*--modules-to-save lm_head"):
        check_named_parts(str(models["policy"]), config)
    for others in ({"rlhf_type": "orpo"}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        check_named_parts(str(models["policy"]), config.model_copy(update=others))


@pytest.mark.parametrize(
    "made",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
)
def test_so_are_those_of_a_folder_that_are_on_the_head(models: dict[str, Path], tmp_path: Path, made: Any) -> None:
    """Single tokens of a head that is the embedding ended in an error of Python."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(models["policy"], tie_word_embeddings=True)
    get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", **made)).save_pretrained(tmp_path)
    config = begun(RlhfConfig(rlhf_type="dpo", adapters=str(tmp_path), model=str(models["policy"])))
    again = AutoModelForCausalLM.from_pretrained(models["policy"], tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"on the head, lm_head, .*Merge them first: shardproof export"):
        with_adapters(again, config)


@pytest.mark.parametrize("made", [{"lora_alpha": 64}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 48}}])
def test_the_reference_has_adapters_at_their_own_scale(models: dict[str, Path], tmp_path: Path, made: Any) -> None:
    """They were scaled as those that are trained, which no shape tells."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def adapted(**options: Any) -> Any:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(models["policy"])
        how = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
        return get_peft_model(base, LoraConfig(**how, **options))

    named, trained = adapted(**made), adapted(lora_alpha=4)
    named.save_pretrained(tmp_path)
    trained.add_adapter(REFERENCE, trained.peft_config["default"])
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = trained(ids).logits
        refer_to(trained, str(tmp_path))
        trained.set_adapter(REFERENCE)
        assert torch.equal(trained(ids).logits, named(ids).logits)
        trained.set_adapter("default")
        assert torch.equal(trained(ids).logits, before)


def test_a_reference_does_not_replace_modules_that_the_trained_adapters_leave(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Embeddings that are trained in full were put on those of the model itself."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def adapted(**options: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(models["policy"])
        return get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options))

    adapted(modules_to_save=["embed_tokens"]).save_pretrained(tmp_path)
    trained = adapted()
    trained.add_adapter(REFERENCE, trained.peft_config["default"])
    with pytest.raises(ConfigError, match=r"do not fit the model: .*embed_tokens.weight is trained in full there"):
        refer_to(trained, str(tmp_path))


def test_a_reference_that_is_scaled_otherwise_is_no_copy_of_another_kind(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Only the scale of LoRA's copies is set; that of other kinds is in their configuration, and in no weight."""
    from peft import LoHaConfig, LoKrConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = {
        "four": LoHaConfig(r=2, alpha=4, target_modules=["q_proj"]),
        "alike": LoHaConfig(r=2, alpha=4, target_modules=["q_proj"], rank_dropout=0.1),
        "eight": LoHaConfig(r=2, alpha=8, target_modules=["q_proj"]),
        "lokr": LoKrConfig(r=2, alpha=4, target_modules=["q_proj"]),
    }
    for name, how in made.items():
        get_peft_model(AutoModelForCausalLM.from_pretrained(models["policy"]), how).save_pretrained(tmp_path / name)

    def check(reference: str) -> None:
        named = {"adapters": str(tmp_path / "four"), "ref_adapters": str(tmp_path / reference)}
        check_reference(RlhfConfig(dataset=["x"], **named))

    check("alike")
    with pytest.raises(ConfigError, match="made with alpha=8, and those of --adapters with 4"):
        check("eight")
    with pytest.raises(ConfigError, match="made with peft_type=LOKR, and those of --adapters with LOHA"):
        check("lokr")
