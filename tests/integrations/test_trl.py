"""`sharded(TrainerClass)` under TRL's trainers with their own arguments, as a script of a user's has them: two ranks,
stage 3, TRL's defaults (bf16, gradient checkpointing), reference and teacher sharded too."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

WORDS = "the a process shard gradient memory weight step rank model gathers holds sends adds every one".split()
QUESTIONS = [[{"role": "user", "content": f"{a} {b}"}] for a, b in itertools.pairwise(WORDS)]
ANSWERS = [[{"role": "assistant", "content": " ".join(WORDS[i : i + 3])}] for i in range(1, len(WORDS))]

SAMPLED = {"num_generations": 2, "max_completion_length": 6, "temperature": 4.0}
TRAINERS: dict[str, tuple[str, str, dict[str, Any], str]] = {  # module, class, arguments, rows
    "sft": ("trl", "SFT", {}, "chats"),
    "dpo": ("trl", "DPO", {"sync_ref_model": True, "ref_model_sync_steps": 1}, "pairs"),
    "kto": ("trl", "KTO", {}, "judged"),
    "grpo": ("trl", "GRPO", {"beta": 0.1, "num_iterations": 2, **SAMPLED}, "prompts"),
    "rloo": ("trl", "RLOO", {"beta": 0.1, **SAMPLED}, "prompts"),
    "distillation": ("trl", "Distillation", {"max_completion_length": 6}, "prompts"),
    "orpo": ("trl.experimental.orpo", "ORPO", {}, "pairs"),
    "gkd": ("trl.experimental.gkd", "GKD", {"lmbda": 1.0, "max_new_tokens": 6}, "chats"),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPO", {"max_new_tokens": 6, "max_length": 64}, "prompts"),
}
DEFAULT = ("dpo", "grpo")  # the most used; the rest with --slow


def dataset(kind: str) -> Any:
    import datasets

    rows = []
    for i, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        other = [{"role": "assistant", "content": "no"}]
        rows.append(
            {
                "chats": {"messages": question + answer},
                "pairs": {"prompt": question, "chosen": answer, "rejected": other},
                "judged": {"prompt": question, "completion": answer, "label": i % 2 == 0},
                "prompts": {"prompt": question},
            }[kind]
        )
    return datasets.Dataset.from_list(rows)


def lengths(completions: list[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
    return [float(len(turns[0]["content"]) % 5) for turns in completions]


def train(name: str, model: str, folder: str) -> dict[str, Any]:
    """Two steps. Returns losses, what was sharded, and whether what was saved is what was trained."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import shardproof
    from shardproof.integrations.transformers import sharded

    module, stem, own, rows = TRAINERS[name]
    found = importlib.import_module(module)
    trainer_class, arguments = getattr(found, f"{stem}Trainer"), getattr(found, f"{stem}Config")
    more: dict[str, Any] = {}
    if name in ("grpo", "rloo", "online_dpo"):
        more["reward_funcs"] = [lengths]
    if name in ("gkd", "distillation"):
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            more["teacher_model"].get_input_embeddings().weight.mul_(2)  # one who knows something else
    trainer = sharded(trainer_class)(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=dataset(rows),
        args=arguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **own,
        ),
        stage=3,
        frozen_stage=1,
        **more,
    )
    before = {n: p.detach().clone() for n, p in AutoModelForCausalLM.from_pretrained(model).named_parameters()}
    trainer.train()
    gathered, whole = [], shardproof.full_state_dict
    shardproof.full_state_dict = lambda *given, **named: gathered.append(given) or whole(*given, **named)
    trainer.save_model(folder)
    shardproof.full_state_dict = whole
    torch.distributed.barrier()
    after = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    frozen = getattr(trainer, "ref_model", None) or getattr(trainer, "teacher_model", None)
    units = shardproof.stats(frozen).units if frozen is not None else None
    return {
        "class": type(trainer).__name__,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "frozen": None if units is None else len(units),
        "gathers": shardproof.stats(trainer.model).total.gathers,
        "unchanged": [n for n in before if torch.equal(before[n], after[n])],
        "precision": str(trainer.shard_precision),
        "gathered": len(gathered),
    }


def save_adapters(model: str, folder: str) -> dict[str, bool]:
    """One step of DPO on a model in adapters, beside which TRL puts a reference. Returns whether each was saved."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from shardproof.integrations.transformers import sharded

    made = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    begin = get_peft_model(AutoModelForCausalLM.from_pretrained(model), made)
    before = {name: p.detach().clone() for name, p in begin.named_parameters() if "lora" in name}
    trainer = sharded(DPOTrainer)(
        model=begin,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=dataset("pairs"),
        args=DPOConfig(folder, max_steps=1, learning_rate=1e-2, report_to="none", save_strategy="no", use_cpu=True),
        stage=3,
    )
    trainer.train()
    trainer.save_model(folder)
    torch.distributed.barrier()
    trained, reference = (load_file(f"{folder}/{place}adapter_model.safetensors") for place in ("", "ref/"))
    names = {name: name.replace(".default", "") for name in before}
    return {
        "trained": all(not torch.equal(trained[names[name]], value) for name, value in before.items()),
        "reference": all(torch.equal(reference[names[name]], value) for name, value in before.items()),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardproof.models.tiny import build_tiny

    folder = build_tiny(tmp_path_factory.mktemp("model"), [" ".join(WORDS)] * 50)
    settings = folder / "generation_config.json"
    content = json.loads(settings.read_text())
    # Many tokens end an answer: ranks write answers of different lengths.
    settings.write_text(json.dumps(content | {"eos_token_id": [content["eos_token_id"], *range(300, 900)]}))
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in TRAINERS])
def test_it_trains_sharded_and_saves(pools: Any, model: Path, tmp_path: Path, name: str) -> None:
    """Losses are numbers, every weight learns and is saved, and so are models that are only asked sharded."""
    results = pools.run(2, train, name, str(model), str(tmp_path / "out"), timeout=300.0)
    for result in results:
        assert result["class"] == f"Sharded{TRAINERS[name][1]}Trainer"
        assert len(result["losses"]) == 2
        assert all(math.isfinite(loss) for loss in result["losses"])
        assert result["losses"] == results[0]["losses"]
        assert result["gathers"] > 0
        assert not result["unchanged"]
        assert not result["gathered"]  # each rank wrote its part of the weights
        assert "bfloat16" in result["precision"]
        if name not in ("sft", "orpo"):
            assert result["frozen"] == 5  # four blocks and the root


@pytest.mark.slow
def test_a_reference_in_adapters_is_saved_beside_those_that_are_trained(
    pools: Any, model: Path, tmp_path: Path
) -> None:
    for found in pools.run(2, save_adapters, str(model), str(tmp_path), timeout=120.0):
        assert found == {"trained": True, "reference": True}
