"""Promise: what an option of sft changes in memory and traffic, a plan changes, too; and so does doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import distributed.two_devices
from distributed.two_devices import DEVICE, HOST, TwoDevices, two_devices
from doctor.measured import told_and_taken
from doctor.test_plan import SMALL, compare, config_in, in_new_processes
from doctor.test_plan_models import DEEPSEEK, EXPERTS, config_of
from shardproof.cli.main import main
from shardproof.doctor.config import DoctorConfig, PlanConfig, RlhfDoctorConfig
from shardproof.doctor.planning.blocks import repeated_blocks
from shardproof.doctor.planning.plan import Candidate, make_plan
from shardproof.doctor.planning.stand_ins import fake_group
from shardproof.doctor.planning.subject import meta_model
from shardproof.errors import ConfigError
from shardproof.train.options.config import Batch, SftConfig

PLUGIN = """
import shardproof, torch

@shardproof.register_optimizer("other_adafactor")
def adafactor(groups, lr):
    return torch.optim.Adafactor(groups, lr=lr)

@shardproof.register_optimizer("sgd")
def sgd(groups, lr):
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return config_in(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("plugins") / "optimizers_of_a_plan.py"
    file.write_text(PLUGIN)
    return str(file)


def one(folder: Path, **options: Any) -> Candidate:
    usual = {"gpus": [2], "stage": "3", "gradient_checkpointing": ["no"], "per_device_batch_size": [2]}
    (found,) = make_plan(PlanConfig(model=str(folder), **usual | {"max_length": [64]} | options)).candidates
    return found


WAYS: dict[str, tuple[str, int, list[int], dict[str, Any]]] = {
    "experts": ("Qwen3MoeConfig", 2, [0, 3], EXPERTS),
    "first blocks differ": ("DeepseekV3Config", 2, [3], DEEPSEEK),
    "windows": ("MistralConfig", 2, [3], {"sliding_window": 32}),
    "adapters of experts": ("Qwen3MoeConfig", 2, [3], {**EXPERTS, "tuner": "lora"}),
    "tied": ("Qwen2Config", 2, [0, 3], {"tie_word_embeddings": True}),
}
OPTIONS: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "lora": (2, [0, 3], {"tuner": "lora"}),
    "lora in fp32": (2, [3], {"tuner": "lora", "precision": "fp32"}),
    "lora in fp16": (2, [0], {"tuner": "lora", "precision": "fp16"}),
    "AdaLoRA": (2, [0, 3], {"tuner": "adalora"}),
    "BOFT": (2, [3], {"tuner": "boft"}),
    "IA3": (2, [3], {"tuner": "ia3"}),
    "norms": (2, [3], {"tuner": "ln_tuning"}),
    "LoHa": (2, [3], {"tuner": "loha"}),
    "MiSS, again": (2, [3], {"tuner": "miss", "gradient_checkpointing": [True]}),
    "OFT": (2, [0, 3], {"tuner": "oft"}),
    "VeRA": (2, [3], {"tuner": "vera", "tuner_arguments": {"r": "16"}}),
    "C3A": (2, [3], {"tuner": "c3a", "tuner_arguments": {"block_size": "16"}}),
    "FourierFT": (2, [3], {"tuner": "fourierft"}),
    "GraLoRA": (2, [3], {"tuner": "gralora"}),
    "RandLoRA": (2, [3], {"tuner": "randlora", "precision": "fp32"}),  # in half, on CPUs, PEFT keeps copies in fp32
    "RoAd": (2, [3], {"tuner": "road"}),
    "Uni-LoRA": (2, [3], {"tuner": "unilora"}),
    "WaveFT": (2, [3], {"tuner": "waveft"}),
    "BEFT": (2, [3], {"tuner": "beft"}),
    "GLoRA": (2, [3], {"tuner": "glora"}),
    "HiRA": (2, [3], {"tuner": "hira"}),
    "HRA": (2, [3], {"tuner": "hra"}),
    "LoKr": (2, [3], {"tuner": "lokr"}),
    "Peanut": (2, [3], {"tuner": "peanut"}),
    "new blocks": (2, [0, 3], {"new_blocks": 7}),
    "new blocks, again": (2, [3], {"new_blocks": 7, "gradient_checkpointing": [True]}),
    "frozen blocks": (2, [0, 3], {"freeze_parameters": ["model.embed_tokens", "model.layers.0", "model.layers.1"]}),
    "four bits": (2, [0, 3], {"tuner": "lora", "quantize": "nf4"}),
    "four bits, again": (2, [3], {"tuner": "lora", "quantize": "nf4", "gradient_checkpointing": [True]}),
    "accumulation": (2, [0, 1, 2, 3], {"gradient_accumulation_steps": 2}),
    "more accumulation": (2, [1, 3], {"gradient_accumulation_steps": 5}),
    "packing": (2, [3], {"packing": True}),
    "labels": (2, [0, 3], {"task": "seq_cls", "num_labels": 3}),
    "labels by adapters": (2, [3], {"task": "seq_cls", "num_labels": 3, "tuner": "lora"}),
    "vectors": (2, [0, 3], {"task": "embedding"}),
    "vectors by adapters": (2, [3], {"task": "embedding", "tuner": "lora"}),
    "answers yes or no": (2, [0, 3], {"task": "generative_reranker"}),
    "answers yes or no by adapters": (2, [3], {"task": "generative_reranker", "tuner": "lora"}),
    "one chunk": (2, [0, 3], {"chunked_loss": True}),
    "chunks": (2, [0, 3], {"chunked_loss": True, "max_length": [400]}),
    "chunks in fp32": (1, [3], {"chunked_loss": True, "max_length": [400], "precision": "fp32"}),
    "chunks of a frozen head": (2, [3], {"chunked_loss": True, "max_length": [400], "tuner": "lora"}),
    "stochastic rounding": (2, [0, 3], {"stochastic_rounding": True}),
    "sequence parallel": (2, [0, 3], {"sequence_parallel": 2}),
    "packed rows that are shared": (2, [0, 3], {"packing": True, "sequence_parallel": 2}),
    "rows shared in pairs": (4, [3], {"sequence_parallel": 2}),
    "labels of shared rows": (2, [0, 3], {"task": "seq_cls", "num_labels": 3, "sequence_parallel": 2}),
    "embeddings of shared rows": (2, [0, 3], {"task": "embedding", "sequence_parallel": 2}),
    "answers yes or no of shared rows": (2, [3], {"task": "generative_reranker", "sequence_parallel": 2}),
    "copies": (4, [1, 3], {"shard_group": 2}),
    "sgd": (2, [0, 3], {"optimizer": "sgd"}),
    "another adafactor": (1, [3], {"optimizer": "other_adafactor"}),
    "adafactor": (2, [0, 3], {"optimizer": "adafactor"}),
    "muon": (2, [0, 3], {"optimizer": "muon"}),
    "galore": (2, [0, 3], {"optimizer": "galore", "optimizer_arguments": {"rank": 8}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_models_are_within_5_percent_of_what_is_measured(tmp_path, way):
    kind, world, stages, shape = WAYS[way]
    options = {name: value for name, value in shape.items() if name in PlanConfig.model_fields}
    folder = config_of(tmp_path, kind, **{name: value for name, value in shape.items() if name not in options})
    compare(in_new_processes, folder, world, stages, **options)


@pytest.mark.slow
def test_so_it_is_where_dtypes_meet(tmp_path):
    """Of a smaller vocabulary: where dtypes meet, a CPU makes copies inside of an operation, which no shape tells."""
    compare(in_new_processes, config_of(tmp_path, "Qwen2Config", vocab_size=1024), 2, [0, 3], reduce_dtype="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("way", OPTIONS)
def test_with_each_option_it_is_within_5_percent_of_what_is_measured(bitsandbytes, folder, plugin, way):
    world, stages, options = OPTIONS[way]
    compare(in_new_processes, folder, world, stages, external_plugins=[plugin], **options)


def test_blocks_that_are_frozen_are_of_another_kind_than_those_that_are_trained(folder):
    plan = {"model": str(folder), "gpus": [2]}
    assert repeated_blocks(meta_model(PlanConfig(**plan, new_blocks=7))).period == 2
    frozen = [f"model.layers.{number}." for number in range(3)]
    assert repeated_blocks(meta_model(PlanConfig(**plan, freeze_parameters=frozen))).first == 3


@pytest.mark.slow
def test_with_accumulation_it_is_within_5_percent_of_what_is_measured(run, folder):
    compare(run, folder, 1, [2], gradient_accumulation_steps=2)


@pytest.mark.slow
def test_state_in_eight_bits_is_that_of_bitsandbytes(bitsandbytes, folder):
    eight, usual = one(folder, optimizer="adamw_8bit"), one(folder)
    assert eight.held["optimizer"] == pytest.approx(usual.held["optimizer"] / 4, rel=0.05)
    assert {**eight.held, "optimizer": 0} == {**usual.held, "optimizer": 0}


@pytest.mark.slow
def test_muon_keeps_one_value_of_a_matrix_and_adafactor_hardly_any(folder):
    usual, muon, adafactor = (one(folder, optimizer=name) for name in ("adamw", "muon", "adafactor"))
    assert 0.5 < muon.held["optimizer"] / usual.held["optimizer"] < 0.9, "embeddings and the head have two"
    assert adafactor.held["optimizer"] < 0.05 * usual.held["optimizer"]


@pytest.mark.slow
def test_a_frozen_base_lies_in_the_dtype_that_it_is_computed_with_or_in_four_bits(bitsandbytes, folder):
    fp32, bf16, nf4 = (
        one(folder, tuner="lora", **more)
        for more in ({"precision": "fp32"}, {"precision": "bf16"}, {"quantize": "nf4"})
    )
    assert bf16.held["weights"] == pytest.approx(fp32.held["weights"] / 2, rel=0.1)  # adapters stay fp32
    assert nf4.held["weights"] < 0.75 * bf16.held["weights"], "embedding and head are not packed"
    assert nf4.wire < 0.75 * bf16.wire
    assert nf4.flops == bf16.flops


@pytest.mark.slow
def test_each_option_changes_what_it_is_for(folder):
    usual = one(folder)
    again = one(folder, gradient_accumulation_steps=4)
    assert again.flops == pytest.approx(4 * usual.flops)
    assert again.tokens == 4 * usual.tokens
    assert again.wire > 3.5 * usual.wire, "stage 3 gathers and reduces for each micro-batch"
    chunked = one(folder, chunked_loss=True)
    assert chunked.activations < usual.activations
    assert chunked.flops == pytest.approx(usual.flops, rel=0.01)  # the last token of a row is no part of it
    assert one(folder, chunked_loss=True, tuner="lora").activations < one(folder, tuner="lora").activations
    shared = one(folder, sequence_parallel=2)
    assert shared.activations == pytest.approx(usual.activations / 2, rel=0.1)
    assert shared.wire > usual.wire
    assert shared.tokens == usual.tokens / 2
    packed = {"packing": True, "sequence_parallel": 2, "max_length": [512]}
    masks = one(folder, attn="sdpa", **packed).activations - one(folder, attn="varlen", **packed).activations
    assert masks >= 2 * 512**2, "of all pairs of tokens of whole rows"
    bf16 = one(folder, stochastic_rounding=True)
    assert bf16.held["weights"] == pytest.approx(usual.held["weights"] / 2, rel=1e-3)
    assert bf16.held["optimizer"] == pytest.approx(usual.held["optimizer"] / 2, rel=1e-3)
    kept, all_kept = one(folder, keep_gathered=1e-4), one(folder, keep_gathered=80)
    assert kept.held["gathered"] == usual.held["gathered"] + 1e5
    assert all_kept.peak < usual.peak + 1.01 * 2 * usual.held["weights"]  # not more than there is
    assert one(folder, keep_gathered=80, stage="2").held == one(folder, stage="2").held
    copies = one(folder, gpus=[8], shard_group=2)
    assert copies.held == usual.held
    assert copies.shard_group == 2


def held_by_host(folder: Path) -> tuple[int, int]:
    """Bytes that the host really holds at the end of a forward pass, and how many move there and back, on two devices
    made of one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardproof
    from shardproof.train.model.activations import HeldByHost

    returned = [0]

    class Counting(HeldByHost):
        def _copy_back(self, host: torch.Tensor) -> torch.Tensor:
            returned[0] += host.nbytes
            return super()._copy_back(host)

    with two_devices():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().train()
        model = shardproof.shard(model, 3, device=DEVICE, mixed_precision=torch.bfloat16)
        ids = torch.zeros(2, 64, dtype=torch.long, device=DEVICE)
        host = Counting(DEVICE, HOST)
        with host:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            held = sum(values.host.nbytes for values in host._held.values())
        loss.backward()
    return held, held + returned[0]


@pytest.mark.slow
def test_activations_that_the_host_holds_are_those_of_a_real_run(folder):
    told, usual = one(folder, gpus=[1], activation_offloading=True), one(folder, gpus=[1])
    held, moved = held_by_host(folder)
    assert told.kept == pytest.approx(held, rel=0.05)
    assert told.crossed == pytest.approx(moved, rel=0.05)
    assert told.activations < usual.activations - 0.5 * held
    tight = make_plan(PlanConfig(model=str(folder), gpus=[1], activation_offloading=True, host_memory=1e-3, stage="3"))
    assert tight.fitting == []


class Live(TwoDevices):
    """The most bytes on the device since `most` was last set to 0."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, sum(s.nbytes() for s, place in self.places.items() if place == DEVICE.index))
        return out


def live_in_backward(folder: Path) -> list[int]:
    """The most bytes that activations take on the device until backward comes to the last block, and then in each block
    but the first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardproof
    from shardproof.train.model.activations import HeldByHost

    found = []
    with mock.patch.object(distributed.two_devices, "TwoDevices", Live), two_devices() as mode:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().train()
        model = shardproof.shard(model, 3, device=DEVICE, mixed_precision=torch.bfloat16)

        def ends(_: Any) -> None:
            found.append(mode.most - before)
            mode.most = 0

        for block in model.model.layers:
            block.register_forward_hook(lambda *a: a[-1].register_hook(ends) and None)
        ids, host = torch.zeros(2, 64, dtype=torch.long, device=DEVICE), HeldByHost(DEVICE, HOST)
        for _ in range(2):
            found.clear()
            mode.most = 0
            torch.ones(1)
            before = mode.most  # in the second step buffers of gradients are among it, which a CPU keeps
            with host:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            model.zero_grad()
    return found


@pytest.mark.slow
def test_what_comes_back_ahead_is_counted(folder, monkeypatch):
    from shardproof.doctor.planning.blocks import repeated_blocks
    from shardproof.doctor.planning.imagine import Rank
    from shardproof.doctor.planning.ledger import ACTIVATIONS
    from shardproof.zero import autograd

    monkeypatch.setattr(autograd, "SMALL_QUEUED", autograd.SMALL)  # a plan is for an accelerator, and this for the CPU
    config = PlanConfig(model=str(folder), activation_offloading=True)
    model = meta_model(config)
    with fake_group(1):
        rank = Rank(model, config, 3, repeated_blocks(model))
        rank.step(2, 64)
        segments = rank.step(2, 64).segments
    told = [columns[ACTIVATIONS].max() for (word, i), columns in segments.items() if word == "backward0" and i != -1]
    assert [segments["loss0", 0][ACTIVATIONS].max(), *told] == pytest.approx(live_in_backward(folder), rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn": "eager", "sequence_parallel": 2}, "--sequence-parallel works with --attn sdpa and varlen"),
        ({"sequence_parallel": 3, "gpus": [6]}, "--sequence-parallel 3: the model has 4 attention heads"),
        ({"sequence_parallel": 4, "gpus": [6]}, "--gpus 6 cannot be divided evenly by --sequence-parallel 4"),
        ({"shard_group": 4, "gpus": [6]}, "--gpus 6 cannot be divided evenly by --shard-group 4"),
        ({"stochastic_rounding": True, "precision": "fp32"}, "--stochastic-rounding"),
        ({"lora_rank": 8}, "--lora-rank"),
        ({"optimizer": "no_such"}, "there is no such optimizer"),
        ({"freeze": ["legs"]}, "--freeze legs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_together_are_refused_as_by_sft(folder, options, said):
    with pytest.raises(ConfigError, match=said):
        one(folder, **options)


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "carry a state from token to token"),
        ("MiniMax", {"layer_types": ["linear_attention", "full_attention"]}, "carry a state from token to token"),
        ("RecurrentGemma", {}, "carry a state from token to token"),
        ("Rwkv", {}, "carry a state from token to token"),
        ("OPT", {}, "counts the positions of a row's tokens itself"),
    ],
)
def test_rows_of_a_model_that_looks_back_beside_attention_are_not_shared(tmp_path, kind, shape, said):
    import transformers

    made = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], num_hidden_layers=2, **shape)
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{kind}ForCausalLM.* {said}"):
        one(tmp_path, sequence_parallel=2)


def test_so_are_those_of_an_encoder_that_counts_positions():
    from transformers import RobertaConfig, RobertaModel

    from shardproof.train.model.attention import check_parts_of_rows

    with torch.device("meta"):
        model = RobertaModel(RobertaConfig(num_hidden_layers=1))
    with pytest.raises(ConfigError, match="RobertaModel counts the positions"):
        check_parts_of_rows(model)


# Options of sft that change neither what a step holds nor what it sends, or that only a run can know.
NOT_COUNTED = {
    *("lora_alpha", "lorap_lr_ratio", "part_learning_rates", "eval_on_start", "router_aux_loss_coef"),
    *(
        "dataset",
        "max_epochs",
        "val_dataset",
        "cached_dataset",
        "cached_val_dataset",
        "val_split",
        "columns",
        "bad_rows",
        "truncation",
    ),
    *(
        "row_cache",
        "system",
        "chat_template",
        "agent_template",
        "token_weights",
        "stop_words",
        "media_root",
        "allow_remote_media",
        "remote_media_cache",
        "max_pixels",
        "max_image_tokens",
        "max_positives",
        "max_negatives",
        "max_frame_tokens",
        "max_seconds",
    ),
    *(
        "max_frame_pixels",
        "max_frames",
        "fps",
        "lost_files",
        "workers",
        "launcher",
        "node_rank",
        "master_addr",
        "master_port",
        "max_steps",
    ),
    *("epochs", "global_batch_size", "group_by_length", "drop_last", "padding_free", "learning_rate"),
    *("lr_scheduler", "lr_scheduler_kwargs"),
    *("warmup_ratio", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *(
        "seed",
        "row_format",
        "model_name",
        "model_author",
        "callbacks",
        "output_dir",
        "overwrite",
        "logging_steps",
        "eval_steps",
        "dtype",
    ),
    *(
        "save_steps",
        "save_strategy",
        "eval_strategy",
        "save_total_limit",
        "save_only_model",
        "resume",
        "max_restarts",
        "min_processes",
        "report_to",
    ),
    *("predict_with_generate", "answer_metrics", "max_new_tokens"),  # at a moment of its own, without activations
    *("profile", "verbose", "metrics", "nnodes", "nproc", "rslora", "template_variables", "best_metric", "early_stop"),
    *("keep_best", "neftune_noise_alpha", "label_names", "problem_type", "plain", "pooling", "loss_temperature"),
    *("model_revision", "streaming", "shuffle_buffer_size", "rope_scaling", "max_model_len"),
    *("interleave_prob", "stopping_strategy", "label_smoothing_factor"),
    *("lisa_activated_layers", "lisa_step_interval"),  # in the end each layer has had its turn, and has its state
    "new_special_tokens",  # some rows more
    "adapters",  # they say --lora-rank and its like, by which they are counted
    "loss_type",
    "init_lora_weights",  # as many adapters; weights are decomposed one after the other, before training
    *(
        "compile",
        "deterministic",
        "fp8",
        "liger_kernel",
        "loss",
        "model_type",
    ),  # another loss, order or code: told in docs/before-training.md
}


def test_every_option_of_sft_is_counted_or_known_not_to_be():
    """A new option has to be one of the two."""
    assert SftConfig.model_fields.keys() - PlanConfig.model_fields.keys() == NOT_COUNTED


@pytest.mark.slow
def test_doctor_plans_the_run_with_all_of_its_options(folder):
    from shardproof.doctor.checks.plan_checks import plan_of

    run = DoctorConfig(
        model=str(folder), stage=2, nproc=4, shard_group=2, gradient_accumulation_steps=3, chunked_loss=True,
        precision="bf16", stochastic_rounding=True, checkpointing_reentrant=True, gradient_checkpointing=True,
        freeze=["vision"], nnodes="2", optimizer="adamw", activation_offloading=True, packing=True,
    )  # fmt: skip
    batch = Batch(micro=2, accumulation=3, world_size=8)  # on two machines
    asked = plan_of(run, batch, str(folder), 64, 80.0)
    assert (asked.gpus, asked.nodes, asked.shard_group, asked.stage) == ([8], 2, 2, "2")
    assert (asked.gradient_accumulation_steps, asked.per_device_batch_size, asked.max_length) == (3, [2], [64])
    for name in ("chunked_loss", "stochastic_rounding", "checkpointing_reentrant", "activation_offloading", "packing"):
        assert getattr(asked, name) is True
    assert asked.freeze == ["vision"]
    assert len(make_plan(asked).candidates) == 1
    copies = plan_of(run.model_copy(update={"shard_group": 1}), batch, str(folder), 64, 80.0)
    assert (copies.gpus, copies.shard_group, copies.stage) == ([8], None, "0"), "each process holds all there is"
    shares = plan_of(
        run.model_copy(update={"shard_group": 1, "packing": False, "sequence_parallel": 2}),
        batch,
        str(folder),
        64,
        80.0,
    )
    assert len(make_plan(shares).candidates) == 1
    alone = plan_of(
        DoctorConfig(model=str(folder)), Batch(micro=1, accumulation=1, world_size=1), str(folder), 64, 80.0
    )
    assert len(make_plan(alone).candidates) == 1


@pytest.mark.slow
def test_the_command_takes_them_and_says_so(folder, capsys):
    rows = ["--per-device-batch-size", "1", "--max-length", "64", "--stage", "3", "--gpus", "4"]
    more = ["--chunked-loss", "--activation-offloading", "--gradient-accumulation-steps", "2", "--stochastic-rounding"]
    assert main(["plan", "--model", str(folder), *rows, *more]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in (
        "AdamW in bf16",
        "2 micro-batches a step",
        "chunked loss",
        "activation offloading",
        "activations, at most",
    ):
        assert word in text


@pytest.mark.slow
def test_models_beside_the_trained_one_and_answers_are_counted(folder):
    """As `rlhf` holds them: a reference at a stage of its own, and what attention keeps while answers are written."""
    from shardproof.doctor.planning.others import asked_only, beside, kept_by, while_writing
    from shardproof.doctor.planning.subject import meta_model

    asked = PlanConfig(model=str(folder), gpus=[2], stage="3", per_device_batch_size=[2], max_length=[512])
    weights = 2 * sum(p.numel() for p in meta_model(asked).parameters())  # in bf16
    assert kept_by(asked, "AutoModelForCausalLM", 3) == pytest.approx(weights / 2, rel=0.01)
    assert kept_by(asked, "AutoModelForCausalLM", 0) == pytest.approx(weights, rel=0.01)
    heads, size = SMALL["num_key_value_heads"], SMALL["hidden_size"] // SMALL["num_attention_heads"]
    cache = 2 * SMALL["num_hidden_layers"] * heads * size * 2  # keys and values of a token, in bf16
    more = while_writing(asked, rows=64, prompt=16) - while_writing(asked, rows=32, prompt=16)
    assert more == pytest.approx(32 * 512 * cache, rel=0.1)
    run = RlhfDoctorConfig(model=str(folder), rlhf_type="ppo", beta=0.1, model_stages={"ref_model": 0}, stage=3)
    assert asked_only(run, str(folder)) == [(str(folder), "AutoModelForCausalLM", 0, "fp32", None)]
    found = beside(run, asked, str(folder))
    assert found["the value model"] > 4 * found["models that are not trained"] / 3
    assert asked_only(run.model_copy(update={"tuner": "lora"}), str(folder)) == []
    beside_it: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    run = RlhfDoctorConfig(model=str(folder), rlhf_type="grpo", **beside_it)
    assert beside(run, asked, str(folder)) == {"vLLM": pytest.approx(0.4 * 80e9)}
    assert beside(run.model_copy(update={"vllm_sleep": True}), asked, str(folder)) == {}


def test_one_that_is_kept_elsewhere_takes_nothing_here(folder):
    from shardproof.doctor.planning.others import beside

    asked = PlanConfig(model=str(folder), gpus=[2], stage="3", per_device_batch_size=[2], max_length=[512])
    run = {"model": str(folder), "rlhf_type": "gkd", "teacher_model": str(folder), "lmbda": 0.0}
    ways: list[Any] = [{}, {"model_offloads": {"teacher_model": "all"}}, {"model_offloads": {"teacher_model": "none"}}]
    (here,), (elsewhere,), (none,) = (
        beside(RlhfDoctorConfig(**run, **way), asked, str(folder)).values() for way in ways
    )
    assert elsewhere < 0.01 * here == 0.01 * none
    asked = asked.model_copy(update={"offload": ["all"]})
    (with_all,), _, (but_it,) = (beside(RlhfDoctorConfig(**run, **way), asked, str(folder)).values() for way in ways)
    assert (with_all, but_it) == (elsewhere, here)


@pytest.mark.parametrize("named", [{"frozen_precision": "fp32"}, {"model_precisions": {"ref_model": "fp32"}}])
def test_a_model_beside_the_trained_one_is_held_in_its_own_precision(folder, named):
    from shardproof.doctor.planning.others import beside

    asked = PlanConfig(model=str(folder), gpus=[2], stage="3", precision="bf16")
    run = {"model": str(folder), "rlhf_type": "dpo", "precision": "bf16"}
    (usual,), (more,) = (beside(RlhfDoctorConfig(**run, **how), asked, str(folder)).values() for how in ({}, named))
    assert more == pytest.approx(2 * usual, rel=0.01)


@pytest.mark.slow
def test_what_lies_elsewhere_is_not_held_beside_the_trained_model_nor_while_it_writes(folder):
    from shardproof.doctor.planning.others import kept_by, while_writing

    def kept(**options: Any) -> float:
        return kept_by(PlanConfig(model=str(folder), gpus=[8], **options), "AutoModelForCausalLM", 3)

    def written(**options: Any) -> float:
        return while_writing(PlanConfig(model=str(folder), gpus=[8], stage="3", max_length=[32], **options), 1, 16)

    assert kept(offload=["nvme"]) < 0.1 * kept(), "and at the next question a part of it at a time"
    assert kept(offload=["optimizer"]) == kept()
    assert kept(shard_group=2) == pytest.approx(4 * kept(), rel=0.05)
    weights = sum(p.numel() for p in meta_model(PlanConfig(model=str(folder))).parameters()) / 8
    assert written() - written(offload=["optimizer"]) > 8 * weights, "two states and most of the masters"
    assert written(shard_group=2) - written() > 30 * weights


@pytest.mark.slow
def test_the_value_model_of_adapters_is_trained_whole(folder):
    from shardproof.doctor.planning.others import beside

    run = RlhfDoctorConfig(model=str(folder), rlhf_type="ppo", tuner="lora")
    asked = PlanConfig(model=str(folder), gpus=[2], stage="3", per_device_batch_size=[1], max_length=[16])
    asked = asked.model_copy(update={"gradient_checkpointing": ["no"]})
    adapted = asked.model_copy(update={"tuner": "lora", "dora": True, "lora_dropout": 0.1, "modules_to_save": ["x"]})
    assert beside(run, adapted, str(folder)) == beside(run, asked, str(folder))


RUNS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo with adapters": {"tuner": "lora"},
    "orpo": {},
    "orpo of many tokens": {"precision": "fp32"},  # in bf16 a CPU copies the logits whose mean TRL logs
    "simpo of many tokens": {"precision": "fp32"},
    "cpo of many tokens": {"precision": "fp32", "cpo_alpha": 0.5},
    "rm": {},
    "gkd": {"lmbda": 0.0},
    "gkd besides sft": {"lmbda": 0.0, "sft_alpha": 0.1},
    "gkd in few tokens": {"lmbda": 0.0, "gkd_logits_topk": 64},
    "gkd in few tokens besides sft": {"lmbda": 0.0, "gkd_logits_topk": 64, "sft_alpha": 0.1},
    "gkd of its own answers": {"lmbda": 1.0, "max_completion_length": 64},
    "grpo": {"reward_funcs": ["length"], "num_generations": 4, "max_completion_length": 64, "beta": 0.1},
    "grpo with experts": {
        "reward_funcs": ["length"],
        "num_generations": 4,
        "max_completion_length": 64,
        "chord_mu_peak": 0.5,
        "chord_sft_per_device_train_batch_size": 4,
    },
}
RUNS["grpo with long experts"] = RUNS["grpo with experts"]


def wide(folder: Path, texts: list[str]) -> str:
    """A tiny model with a vocabulary as of large ones, whose logits count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardproof.models.tiny import build_tiny

    build_tiny(folder, texts)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 16384
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_runs_of_rlhf_take_what_is_told_or_a_little_less(tmp_path, kind):
    """Of rows of about one length, where the longest is planned."""
    name, lines = kind.split()[0], []
    for number in range(10, 30):
        turns = [{"role": "user", "content": f"What is {number} and one?"}]
        answer = {"role": "assistant", "content": f"It is {number + 1}."}
        pair = {"messages": [*turns, answer], "rejected_response": f"It is {number + 2}."}
        rows = {"grpo": {"messages": turns}, "gkd": {"messages": [*turns, answer]}}
        lines.append(json.dumps(rows.get(name, pair)))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    options = {"rlhf_type": name, "dataset": [str(tmp_path / "rows.jsonl")], "per_device_batch_size": 4, **RUNS[kind]}
    if "experts" in kind:  # as long as answers may be
        words = {"role": "assistant", "content": " ".join(str(number) for number in range(10, 40))}
        words["content"] *= 4 if "long" in kind else 1
        expert = json.dumps({"messages": [{"role": "user", "content": "What is 10 and one?"}, words]}) + "\n"
        (tmp_path / "experts.jsonl").write_text(expert * 8)
        options["chord_sft_dataset"] = [str(tmp_path / "experts.jsonl")]
    if name == "gkd" or "many tokens" in kind:
        options["model"] = wide(tmp_path / "wide", lines)
    if name == "gkd":
        options["teacher_model"] = options["model"]
    ((told, taken),) = in_new_processes(1, told_and_taken, options, str(tmp_path), timeout=300)
    assert told == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("many", [5, 50])
def test_experts_are_planned_as_long_as_they_are(tmp_path, many):
    """And not as the prompts."""
    from shardproof.doctor.checks.plan_checks import memory
    from shardproof.models.tiny import build_tiny
    from shardproof.train.model.loading import load_processing
    from shardproof.train.rlhf.chord import encoded_experts

    folder = str(tmp_path / "model")
    build_tiny(folder, ["one two three"] * 8)
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": " two" * many}]
    (tmp_path / "experts.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    named: dict[str, Any] = {"chord_sft_dataset": [str(tmp_path / "experts.jsonl")], "chord_mu_peak": 0.5}
    batch, config = (
        Batch(micro=2, accumulation=1, world_size=1),
        RlhfDoctorConfig(model=folder, rlhf_type="grpo", memory=80.0, max_length=128, max_completion_length=8, **named),
    )
    processing = load_processing(folder, config)
    (ids,) = encoded_experts(config, processing)["input_ids"]
    told = memory(config, batch, folder, None, processing)[0].evidence
    assert f"2 row(s) of 136 tokens and 1 expert row(s) of {len(ids)}" in told
    assert many <= len(ids) < 128
    (tmp_path / "experts.jsonl").unlink()
    assert "1 expert row(s) of 136" in memory(config, batch, folder, None, processing)[0].evidence


def told_by_a_rank(folder: str) -> str:
    """As doctor does on several machines, where the first rank looks."""
    from shardproof.doctor.checks.plan_checks import memory

    run = DoctorConfig(model=folder, memory=80.0, max_length=64)
    return memory(run, Batch(micro=1, accumulation=1, world_size=2), folder, None)[0].evidence


@pytest.mark.slow
def test_a_rank_can_be_told_what_it_will_hold(run, folder):
    assert "of 80.00 GB per process" in run(1, told_by_a_rank, str(folder), timeout=120)[0]


def test_what_is_told_says_what_it_leaves_out(tiny_models):
    from shardproof.doctor.checks.plan_checks import memory

    sees = str(tiny_models("qwen2_5_omni"))
    found = memory(
        DoctorConfig(model=sees, memory=80.0, max_length=64), Batch(micro=1, accumulation=1, world_size=1), sees, None
    )[0]
    assert "audio" in found.evidence
    assert found.evidence.endswith("everything but activations is counted")


def test_a_plugins_model_under_another_name_is_not_counted_as_that(folder):
    from shardproof.doctor.checks.plan_checks import memory

    own = DoctorConfig(model=str(folder), model_type="own", memory=80.0, max_length=64)
    (check,) = memory(own, Batch(micro=1, accumulation=1, world_size=1), str(folder), None)
    assert (check.status, "--model-type own is a plugin's" in check.evidence) == ("warn", True)


@pytest.mark.parametrize(
    ("offload", "kept", "host", "disk", "found"),
    [
        ("optimizer", 0.0, 9, 1, {"memory of the host": "16.00 GB for 2 process(es), but only 9.00 GB are free"}),
        ("all", 0.0, 17, 1, {}),
        ("optimizer", 1e9, 17, 1, {"memory of the host": "18.00 GB for 2 process(es), but only 17.00 GB are free"}),
        ("nvme", 1e9, 3, 17, {}),
        ("nvme", 0.0, 1, 15, {"disk of DISK": "16.00 GB for 2 process(es), but only 15.00 GB are free"}),
        (None, 0.0, 0, 0, {}),
    ],
)
def test_what_is_not_on_the_devices_has_to_fit_where_it_lies(
    tmp_path: Path, offload: str | None, kept: float, host: int, disk: int, found: dict[str, str]
) -> None:
    """8 GB of each of four processes, two on a machine; the folder on the disk is not there yet."""
    from shardproof.doctor.checks import plan_checks
    from shardproof.zero import device

    lies = {"offload": offload or "none", "home": 8e9 if offload else 0.0, "kept": kept}
    candidate = Candidate(3, 4, False, 1, 64, {}, 0.0, 0.0, 0.0, 0, 1.0, **lies)
    named = f"nvme:{tmp_path}/not/there" if offload == "nvme" else offload
    run = DoctorConfig(model="m", dataset=["d"], offload=named, nnodes="2")
    batch = Batch(micro=1, accumulation=1, world_size=4)
    room = mock.Mock(free=disk * 10**9)
    of_host = mock.patch.object(device, "host_memory", return_value=host * 10**9)
    with of_host, mock.patch.object(plan_checks.shutil, "disk_usage", return_value=room):
        checks = plan_checks.room_elsewhere(run, batch, candidate)
    assert {check.name.replace(str(tmp_path), "DISK"): check.evidence for check in checks} == found
    assert all(check.status == "fail" for check in checks)


@pytest.mark.slow
def test_what_is_left_can_hold_gathered_weights(folder):
    from shardproof.doctor.planning.plan_view import verdict

    config = PlanConfig(model=str(folder), gpus=[2], stage="3", max_length=[64])
    plan = make_plan(config)
    plan.whole = 7.9e9
    assert verdict(plan, config).endswith("The remaining memory can save gathers: --keep-gathered 7.")
    plan.limit = plan.fitting[0].peak + 1e8
    assert "--keep-gathered" not in verdict(plan, config)


@pytest.mark.slow
def test_a_switch_of_sft_may_stand_alone_in_a_plan(folder, capsys) -> None:
    """Also because a plan names the fastest run so."""
    asked = ["plan", "--model", str(folder), "--gpus", "2", "--stage", "3", "--max-length", "64", "--json"]
    found = []
    for said in (["--gradient-checkpointing"], ["--gradient-checkpointing", "yes"]):
        assert main([*asked, *said]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert {candidate["checkpointing"] for candidate in found[0]["candidates"]} == {True}
