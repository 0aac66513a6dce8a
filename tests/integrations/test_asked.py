"""Every place where transformers and TRL ask whether DeepSpeed or FSDP is on. We answer no, everywhere: the model is an
ordinary one. ASKED says what follows from that in each place and why it is right; a release that asks somewhere else
fails here first, so that somebody looks."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

QUESTIONS = {"is_deepspeed_enabled", "is_fsdp_enabled"}

# What a no leads to, and why that is what we want.
LOADS = "loads as in one process: weights are whole until `shard` cuts them, unit by unit"
PLACES = "would place the model on the device; `_move_model_to_device` leaves it, `shard` moves a slice at a time"
CHECKS = "forbids nothing of what only those engines cannot do; we refuse them ourselves once the accelerator is made"
RATE = "reads the learning rate from the scheduler, which stands still in steps that the fp16 loss scaler leaves out"
RESUMES = "loads whole weights before it trains; what our engine shards is in the checkpoint's own room"
PREPARES = "makes the optimizer first, through `create_optimizer`, where we shard; then accelerate leaves both alone"
INPUTS = "moves inputs and leaves their dtype: MixedPrecision casts what the model computes with"
PARALLEL = "no tensor parallelism"
RETRIES = "may try a smaller batch after running out of memory"
EVALUATES = "asks `accelerator.prepare_model`, where we shard a model that was not trained; no cast of the inputs"
CHECKPOINT = "writes the optimizer's state and the best model as of an ordinary model"
SAVES = "never asked: `save_model` is ours"
SEARCH = "hyperparameter search changes no DeepSpeed configuration"
TELEMETRY = "counts us among the data-parallel"
FROZEN = "hands reference, reward model or teacher to `accelerator.prepare_model`, where we shard it as a frozen one"
ONCE = "asks the reference once, before training; without one it is the policy, sharded by then"
WHOLE = "generates with the model as it is: a sharded one gathers itself, nothing is unwrapped or summoned"
VLLM = "hands weights to vLLM parameter by parameter; each is whole to who looks"
REFERENCE = "keeps no reference when it is asked once; " + ONCE

ASKED: dict[tuple[str, str, str], str] = {
    ("transformers", "integrations/accelerate.py", "accelerate_dispatch"): LOADS,
    ("transformers", "modeling_utils.py", "PreTrainedModel._move_missing_keys_from_meta_to_device"): LOADS,
    ("transformers", "modeling_utils.py", "PreTrainedModel._initialize_missing_keys"): LOADS,
    ("transformers", "trainer.py", "Trainer.__init__"): PLACES,
    ("transformers", "trainer.py", "Trainer._validate_args"): CHECKS,
    ("transformers", "trainer.py", "Trainer.create_accelerator_and_postprocess"): CHECKS,
    ("transformers", "trainer.py", "Trainer._get_learning_rate"): RATE,
    ("transformers", "trainer.py", "Trainer.train"): RESUMES,
    ("transformers", "trainer.py", "Trainer._prepare_for_training"): PREPARES,
    ("transformers", "trainer.py", "Trainer._prepare_input"): INPUTS,
    ("transformers", "trainer.py", "Trainer.get_tp_size"): PARALLEL,
    ("transformers", "trainer.py", "Trainer._update_auto_batch_size"): RETRIES,
    ("transformers", "trainer.py", "Trainer.evaluation_loop"): EVALUATES,
    ("transformers", "trainer.py", "Trainer._save_optimizer_and_scheduler"): CHECKPOINT,
    ("transformers", "trainer.py", "Trainer._load_from_checkpoint"): CHECKPOINT,
    ("transformers", "trainer.py", "Trainer._load_best_model"): CHECKPOINT,
    ("transformers", "trainer.py", "Trainer._load_optimizer_and_scheduler"): CHECKPOINT,
    ("transformers", "trainer.py", "Trainer.save_model"): SAVES,
    ("transformers", "trainer.py", "Trainer._hp_search_setup"): SEARCH,
    ("trl", "trainer/base_trainer.py", "_BaseTrainer._send_telemetry"): TELEMETRY,
    ("trl", "trainer/distillation_trainer.py", "DistillationTrainer.__init__"): FROZEN,
    ("trl", "trainer/dpo_trainer.py", "DPOTrainer.__init__"): REFERENCE,
    ("trl", "trainer/dpo_trainer.py", "DPOTrainer._precompute_ref_logps"): ONCE,
    ("trl", "trainer/grpo_trainer.py", "GRPOTrainer.__init__"): FROZEN,
    ("trl", "trainer/kto_trainer.py", "KTOTrainer.__init__"): REFERENCE,
    ("trl", "trainer/kto_trainer.py", "KTOTrainer._precompute_ref_logps"): ONCE,
    ("trl", "trainer/rloo_trainer.py", "RLOOTrainer.__init__"): FROZEN,
    ("trl", "experimental/gkd/gkd_trainer.py", "GKDTrainer.__init__"): FROZEN,
    ("trl", "experimental/gold/gold_trainer.py", "GOLDTrainer.__init__"): FROZEN,
    ("trl", "experimental/iw_opd/iw_opd_trainer.py", "IWOPDTrainer.__init__"): FROZEN,
    ("trl", "experimental/online_dpo/online_dpo_trainer.py", "OnlineDPOTrainer.__init__"): FROZEN,
    ("trl", "experimental/online_dpo/online_dpo_trainer.py", "OnlineDPOTrainer._move_model_to_vllm_inner"): VLLM,
    ("trl", "experimental/online_dpo/online_dpo_trainer.py", "OnlineDPOTrainer._generate"): WHOLE,
    ("trl", "experimental/sdft/sdft_trainer.py", "SDFTTrainer._setup_teacher_model"): FROZEN,
    ("trl", "experimental/sdft/sdft_trainer.py", "SDFTTrainer._generate_transformers"): WHOLE,
    ("trl", "experimental/sdpo/sdpo_trainer.py", "SDPOTrainer.__init__"): FROZEN,
    ("trl", "experimental/sdpo/sdpo_trainer.py", "SDPOTrainer._setup_teacher_model"): FROZEN,
    ("trl", "experimental/sdpo/sdpo_trainer.py", "SDPOTrainer._generate_transformers"): WHOLE,
}


def asked_in(package: str) -> Iterator[tuple[str, str, str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    base = Path(spec.submodule_search_locations[0])

    def walk(node: ast.AST, where: list[str], file: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            inside = [*where, child.name] if isinstance(child, ast.FunctionDef | ast.ClassDef) else where
            name = getattr(child, "attr", None) if isinstance(child, ast.Attribute) else getattr(child, "id", None)
            if name in QUESTIONS and isinstance(getattr(child, "ctx", None), ast.Load):
                yield package, file, ".".join(inside)
            yield from walk(child, inside, file)

    for path in sorted(base.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(question in text for question in QUESTIONS):
            yield from walk(ast.parse(text), [], path.relative_to(base).as_posix())


def installed(package: str) -> tuple[int, ...]:
    from importlib.metadata import version

    return tuple(int(part) for part in version(package).split(".")[:2])


@pytest.mark.parametrize("package, known", [("transformers", (5, 23)), ("trl", (1, 16))])
def test_every_place_that_asks_is_known(package: str, known: tuple[int, int]) -> None:
    """The table lists where the pinned release asks, no more and no less."""
    if installed(package) != known:
        pytest.skip(f"the table is of {package} {known}")
    assert set(asked_in(package)) == {place for place in ASKED if place[0] == package}


def test_the_answer_is_no(tmp_path: Path) -> None:
    """A trainer on our engine answers no to both, and hands every model that it only asks to the accelerator."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import shardproof
    from shardproof.integrations.transformers import sharded

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model, other = (LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)) for _ in range(2))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = sharded(Trainer)(model=model, args=args, stage=3, frozen_stage=1)
    assert not trainer.is_deepspeed_enabled
    assert not trainer.is_fsdp_enabled
    assert trainer.accelerator.prepare_model(other, evaluation_mode=True) is other
    assert shardproof.stats(other).units
    assert not any(parameter.requires_grad for parameter in other.parameters())
    assert trainer.accelerator.prepare_model(model, evaluation_mode=True) is model  # as `evaluate` before training does
    assert shardproof.stats(model).units
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("other", ["DeepSpeed", "FSDP", "parallelism_config"])
def test_what_we_cannot_be_together_with_is_refused(tmp_path: Path, other: str) -> None:
    """Told of another engine, the trainer says so at once, in words of two lines."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from shardproof.errors import ConfigError
    from shardproof.integrations.transformers import sharded

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    setattr(args, other.lower(), True)
    with pytest.raises(ConfigError, match=other):
        sharded(Trainer)(model=model, args=args)
