"""Weights for a vLLM server: what TRL's own code hands to its client, with one that writes down in its place.

There is no server and no GPU here. All of TRL runs but for the client, which stands for the network.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from integrations.test_trl import dataset
from shardproof.errors import ConfigError
from shardproof.integrations.server import serve_weights, whole_weights

Weights = dict[str, torch.Tensor]


class Client:
    """In place of TRL's VLLMClient: keeps what is sent, and answers with two tokens."""

    def __init__(self, base_url: str, group_port: int, connection_timeout: float) -> None:
        self.base_url = base_url
        self.syncs: list[Weights] = []
        self.most = 0  # bytes of what was sent that were in memory at a time

    def init_communicator(self, device: Any) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Any) -> None:
        got: Weights = {}
        alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
        for (name, dtype, shape), (sent, weight) in zip(metadata, named_params, strict=True):
            assert (sent, str(weight.dtype), list(weight.shape)) == (name, f"torch.{dtype}", shape)
            assert type(weight) in (torch.Tensor, torch.nn.Parameter)
            got[sent] = weight.clone()
            alive.append((weakref.ref(weight), weight.nbytes))
            self.most = max(self.most, sum(size for ref, size in alive if ref() is not None))
            del weight
        self.syncs.append(got)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], n: int, **sampling: Any) -> dict[str, Any]:
        answers = [[10 + i % 5, 11] for i in range(n * len(prompts))]
        chances = [[[-7.5], [-7.5]] for _ in answers]  # about what a model knows that knows nothing
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": chances}


def first_token(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def adapted(model: Any, **named: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return get_peft_model(model, config, **named)


def served(name: str, stage: int, source: str, folder: str, lora: bool) -> dict[str, Any]:
    """Two steps; then what is sent by us, and by TRL itself from a whole model of the same weights."""
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation import vllm_generation

    import shardproof
    from shardproof.integrations.transformers import sharded

    def model() -> Any:
        plain = AutoModelForCausalLM.from_pretrained(source)
        return adapted(plain) if lora else plain

    with (
        mock.patch.object(vllm_generation, "is_vllm_available", return_value=True),
        mock.patch.object(vllm_generation, "VLLMClient", Client),
    ):
        arguments = {"num_generations": 2, "max_completion_length": 4, "use_vllm": True, "vllm_mode": "server"}
        trainer = sharded(getattr(trl, f"{name}Trainer"))(
            model=model(),
            processing_class=AutoTokenizer.from_pretrained(source),
            train_dataset=dataset("prompts"),
            reward_funcs=[first_token],
            args=getattr(trl, f"{name}Config")(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                bf16=False,
                **arguments,
            ),
            stage=stage,
        )
        trainer.train()
        before = shardproof.full_state_dict(trainer.model, rank0_only=False)
        trainer.vllm_generation.sync_weights()
        after = shardproof.full_state_dict(trainer.model, rank0_only=False)
        whole = model()
        whole.load_state_dict({name: before[name] for name in whole.state_dict()})  # RLOO adds adapters of its own
        theirs = vllm_generation.VLLMGeneration(whole, trainer.accelerator, None, mode="server")
        theirs.sync_weights()
    result = {"untouched": all(torch.equal(before[n], after[n]) for n in before)}
    if trainer.accelerator.is_main_process:
        client = trainer.vllm_generation.vllm_client
        (expected,), syncs = theirs.vllm_client.syncs, client.syncs
        gc.collect()
        result |= {
            "syncs": len(syncs),
            "moved": any(not torch.equal(syncs[0][n], syncs[-1][n]) for n in syncs[0]),
            "odd names": sorted(syncs[-1].keys() ^ expected.keys()),
            "odd bits": [n for n in expected if n in syncs[-1] and not torch.equal(syncs[-1][n], expected[n])],
            "share": client.most / sum(weight.nbytes for weight in expected.values()),
        }
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardproof.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("model"), ["the a process shard gradient"] * 50)


def test_adapters_of_any_name_are_given_with_the_modules_that_they_have_copied(model: Path) -> None:
    """A copied head of adapters that are not called `default` was left out, and vLLM went on with the one before."""
    from transformers import AutoModelForCausalLM

    import shardproof

    given = []
    for named in ({}, {"adapter_name": "policy"}):
        torch.manual_seed(0)  # the files have no head
        trained = adapted(AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=False), **named)
        shardproof.shard(trained, 3)
        given.append(dict(whole_weights(trained, SimpleNamespace(device="cpu"))))
    assert "lm_head.weight" in given[0]
    assert given[0].keys() == given[1].keys()
    assert all(torch.equal(given[0][name], given[1][name]) for name in given[0])


CASES = [("GRPO", 3, False), ("GRPO", 3, True), ("RLOO", 1, True), ("GRPO", 0, True)]
SLOW = [(name, stage, lora) for name in ("GRPO", "RLOO") for stage in range(4) for lora in (False, True)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name, stage, lora",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES)],
)
def test_the_server_gets_the_weights_of_one_process(
    run2: Any, model: Path, tmp_path: Path, name: str, stage: int, lora: bool
) -> None:
    """Bit for bit, adapters merged as TRL merges them, a unit at a time; and the model stays as it was."""
    first, other = run2(served, name, stage, str(model), str(tmp_path), lora, timeout=300)
    assert first["syncs"] == 3
    assert first["moved"]
    assert first["odd names"] == []
    assert first["odd bits"] == []
    assert first["untouched"]
    assert other == {"untouched": True}
    assert first["share"] < 0.75


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"target_modules": ["lm_head"]}, True),
        ({"target_modules": ["embed_tokens"]}, True),
        ({"target_modules": ["q_proj"]}, False),
    ],
)
def test_adapters_of_a_weight_that_two_places_share_are_refused(options, refused) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for tied in (True, False):
        base = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=tied))
        model = get_peft_model(base, LoraConfig(**options))
        generation = SimpleNamespace(mode="server", accelerator=None, _iter_named_params=None)
        if tied and refused:
            with pytest.raises(ConfigError, match=r"one weight for model\.embed_tokens and lm_head, which"):
                serve_weights(generation, model, None)
        else:
            serve_weights(generation, model, None)


def given(kind: str, lora: bool, folder: str) -> tuple[list[str], list[str], list[str]]:
    """Names in files, names that are given, and which of these hold other bits."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    import shardproof
    from models.tiny_configs import TINY
    from shardproof.integrations.server import whole_weights

    def model() -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import CONFIG_MAPPING

        torch.manual_seed(3)
        config = CONFIG_MAPPING[kind](**TINY[kind])
        auto = (
            AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
        )
        plain = auto.from_config(config)
        if not lora:
            return plain
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return get_peft_model(
            plain, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
        )

    whole = model()
    (whole.merge_and_unload() if lora else whole).save_pretrained(folder)  # transformers has the first rank write
    torch.distributed.barrier()
    expected = load_file(Path(folder) / "model.safetensors")
    mine = dict(
        whole_weights(shardproof.shard(model(), 3), SimpleNamespace(device=torch.device("cpu")), everywhere=True)
    )
    odd = [name for name in expected if name in mine and not torch.equal(mine[name], expected[name])]
    return sorted(expected), sorted(mine), odd


@pytest.mark.parametrize(
    ("kind", "lora", "held"),
    [
        ("qwen3_moe", False, "model.layers.0.mlp.experts.3.down_proj.weight"),
        ("qwen3_moe", True, "model.layers.0.mlp.experts.3.down_proj.weight"),
        ("qwen2_5_vl", False, "visual.patch_embed.proj.weight"),
    ],
)
def test_weights_are_given_as_files_hold_them(run2, tmp_path, kind, lora, held) -> None:
    """Of a mixture of experts each expert by itself, though the model has them in one tensor."""
    for rank, (expected, mine, odd) in enumerate(run2(given, kind, lora, str(tmp_path))):
        assert held in expected
        assert mine == expected, rank
        assert odd == []
