"""Promise: commands written for ms-swift run here as they are, or are refused by name before anything is loaded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardproof.cli import infer, sft, swift, training
from shardproof.cli.from_swift import hubs
from shardproof.cli.options import parse
from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_evaluation
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-swift.md"

LORA = """
# 22GB
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --train_type lora \\
    --dataset 'a.jsonl#500' b.jsonl \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 1 \\
    --learning_rate 1e-4 \\
    --lora_alpha 32 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps 16 \\
    --eval_steps 50 \\
    --max_length 2048 \\
    --system 'You are a helpful assistant.' \\
    --warmup_ratio 0.05 \\
    --dataloader_num_workers 4
"""


def options(command: str) -> dict[str, str]:
    """The options of a printed command, each with its values."""
    words = re.split(r"\s*\\\n\s*", command)
    return {name: value for name, _, value in (word.partition(" ") for word in words[1:])}


def test_a_command_is_translated_with_the_defaults_that_differ():
    command, notes, missing = swift.translate(LORA)
    assert missing == []
    assert options(command) == {
        "--model": "MS::Qwen/Qwen2.5-7B-Instruct",
        "--tuner": "lora",
        "--dataset": "'a.jsonl#500' b.jsonl",
        "--precision": "bf16",
        "--epochs": "1",
        "--per-device-batch-size": "1",
        "--learning-rate": "1e-4",
        "--lora-alpha": "32",
        "--target-modules": "all-linear",
        "--gradient-accumulation-steps": "16",
        "--max-length": "2048",
        "--system": "'You are a helpful assistant.'",
        "--warmup-ratio": "0.05",
        "--weight-decay": "0.1",
        "--adam-beta2": "0.95",
        "--gradient-checkpointing": "yes",
        "--checkpointing-reentrant": "no",
        "--lora-rank": "8",
        "--lora-dropout": "0.05",
        "--logging-steps": "5",
        "--save-steps": "500",
        "--report-to": "tensorboard",
        "--bad-rows": "skip",
        "--stage": "0",
    }
    assert notes == [
        hubs.TOLD,
        "--dataloader-num-workers is left out: rows are encoded before training",
        "CUDA_VISIBLE_DEVICES=0 means the same here: put it before the command",
        "--eval-steps 50 is left out: there are no rows to evaluate on",
    ]


def test_a_variable_with_another_meaning_has_no_equivalent():
    *_, missing = swift.translate("GENERATIVE_RERANKER_NEGATIVE_TOKEN=nein swift sft --model m --dataset d")
    assert missing == ["GENERATIVE_RERANKER_NEGATIVE_TOKEN=nein: here it is always 'no'"]
    *_, missing = swift.translate("QWENVL_BBOX_FORMAT=new swift sft --model m --dataset d")
    assert missing == ["QWENVL_BBOX_FORMAT=new: here it is always 'legacy'"]
    _, notes, missing = swift.translate("QWENVL_BBOX_FORMAT=legacy swift sft --model m --dataset d")
    assert missing == []
    assert not any("QWENVL" in note for note in notes)


def test_a_strategy_of_checkpoints_takes_the_place_of_their_steps():
    command, notes, _ = swift.translate("swift sft --model m --dataset d --save_strategy epoch --val_dataset v")
    assert "--save-strategy epoch" in command
    assert "--save-steps" not in command
    assert "--eval-steps" not in command
    assert "--eval-strategy epoch" in command  # as there: when it saves
    assert not any("evaluat" in note for note in notes)
    command, *_ = swift.translate("swift sft --model m --dataset d --save_strategy steps --val_dataset v")
    assert "--eval-steps 500" in command
    command, *_ = swift.translate("swift sft --model m --dataset d --val_dataset v --eval_strategy no")
    assert "--eval-strategy no" in command
    assert "--eval-steps" not in command


def test_answers_in_evaluations_are_judged_as_there():
    said = "swift sft --model m --dataset d --tuner_type full"
    generates = f"{said} --val_dataset v --predict_with_generate true"
    command, notes, missing = swift.translate(f"{generates} --load_best_model_at_end --metric_for_best_model rouge-l")
    assert missing == []
    found = options(command)
    assert found["--max-new-tokens"] == "64"
    assert found["--answer-metrics"] == "rouge_l bleu"
    assert found["--best-metric"] == "rouge_l"
    assert any("sacrebleu's bleu" in note for note in notes)
    sft.parse(shlex.split(command.replace("\\\n", " "))[2:])
    assert "--answer-metrics rouge_l bleu" in swift.translate(f"{generates} --eval_metric nlg")[0]
    assert "--metrics mine" in swift.translate(f"{generates} --eval_metric mine --external_plugins p.py")[0]
    finds = "swift sft --model Qwen/Qwen3-Embedding-0.6B --task_type embedding --dataset a.jsonl --val_dataset b.jsonl"
    command, _, missing = swift.translate(f"{finds} --eval_metric infonce")
    assert ("--metrics" in command, missing) == (False, [])
    infer = "swift infer --adapters runs/a --val_dataset v --metric"
    for theirs, ours in {
        "acc": " --answer-metrics exact_match",
        "rouge": " --answer-metrics rouge_l bleu",
        "none": "",
    }.items():
        command, _, missing = swift.translate(f"{infer} {theirs}")
        assert missing == []
        assert command == f"shardproof infer runs/a --dataset v{ours}"
    for nobody in (said, f"{said} --val_dataset v"):
        more = "--max_new_tokens 9" if "--val" in nobody else "--predict_with_generate true"
        command, notes, missing = swift.translate(f"{nobody} {more}")
        assert missing == []
        assert "predict" not in command
        assert "new-tokens" not in command
        assert any("is left out" in note for note in notes)


@pytest.mark.parametrize(("nodes", "accumulated"), [("", "4"), ("NNODES=2 ", "2"), ("NNODES=$N ", "4")])
def test_a_step_has_so_many_rows_on_all_nodes(nodes, accumulated):
    """16, as there."""
    command, *_ = swift.translate(f"{nodes}NPROC_PER_NODE=4 swift sft --model m --dataset d")
    assert options(command)["--gradient-accumulation-steps"] == accumulated


@pytest.mark.parametrize("none", ["", "--split_dataset_ratio 0.", "--split_dataset_ratio 0"])
def test_evaluations_of_no_rows_are_left_out(none):
    """There nothing is evaluated then; here such options are refused."""
    said = f"swift sft --model m --dataset d {none} --eval_steps 50 --eval_strategy steps"
    command, notes, missing = swift.translate(said)
    assert missing == []
    assert "--eval" not in command
    assert "--eval-steps 50 is left out: there are no rows to evaluate on" in notes
    config, _ = sft.parse(shlex.split(command.replace("\\\n", " "))[2:])
    check_evaluation(config)
    assert "--eval-steps 50" in swift.translate(f"{said.replace(none, '')} --split_dataset_ratio 0.01")[0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--tuner_type adalora --adalora_target_r 4", ("adalora", "target_r=4 lora_alpha=32 lora_dropout=0.05")),
        ("--tuner_type adalora --lora_alpha 16 --lora_rank 4", ("adalora", "lora_alpha=16 lora_dropout=0.05")),
        ("--tuner_type bone --lora_rank 4 --lora_dropout 0.1", ("bone", "r=4")),
        ("--tuner_type fourierft", ("fourierft", "n_frequency=2000 scaling=300")),
        ("--tuner_type boft", ("boft", None)),
        ("--tuner_type lora --boft_block_size 4", ("lora", None)),
    ],
)
def test_other_adapters_are_those_of_swifts_defaults(theirs, ours):
    command, _, missing = swift.translate(f"swift sft --model m --dataset d {theirs}")
    assert missing == []
    found = options(command)
    assert (found["--tuner"], found.get("--tuner-arguments")) == ours
    assert found["--learning-rate"] == "1e-4"
    if ours[0] != "lora":
        assert not {"--lora-rank", "--lora-alpha", "--lora-dropout"} & set(found)
    sft.parse(shlex.split(command.replace("\\\n", " "))[2:])


def test_llama_pro_is_full_training_of_new_blocks():
    command, _, missing = swift.translate("swift sft --model m --dataset d --tuner_type llamapro")
    assert missing == []
    found = options(command)
    assert (found["--tuner"], found["--new-blocks"], found["--learning-rate"]) == ("full", "4", "1e-4")
    with pytest.raises(ConfigError, match="--tuner full --new-blocks 4"):
        sft.parse(["--tuner_type", "llamapro"])


def test_towers_that_are_trained_whole_beside_lora_are_named_as_parts():
    said = "swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --dataset d --tuner_type lora_llm --freeze_vit true"
    command, _, missing = swift.translate(said)
    assert missing == []
    assert options(command)["--modules-to-save"] == "vision audio aligner"
    assert "--freeze" not in options(command)


def test_what_is_printed_is_taken():
    command, *_ = swift.translate(f"export USE_HF=1\n{LORA}")
    config, _ = sft.parse(shlex.split(command.replace("\\\n", " "))[2:])
    assert (config.tuner, config.gradient_checkpointing, config.checkpointing_reentrant) == ("lora", True, False)
    assert config.dataset == ["a.jsonl#500", "b.jsonl"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--num_train_epochs 2 --train_type lora", "--epochs 2 --tuner lora"),
        ("--num-train-epochs=2 --tuner-type=full", "--epochs 2 --tuner full"),
        (
            "--tuner_type lora_llm --vit_lr 1e-5",
            "--tuner lora --modules-to-save vision audio aligner --part-learning-rates vision=1e-5,audio=1e-5",
        ),
        ("--tuner_type full --llamapro_num_new_blocks 2", "--tuner full --new-blocks 2"),
        ("--lisa_activated_layers 2 --lisa_step_interval 10", "--lisa-activated-layers 2 --lisa-step-interval 10"),
        ("--train_type boft --boft_block_size 8", "--tuner boft --tuner-arguments boft_block_size=8"),
        ("--tuner_type vera --vera_rank 64 --vera_d_initial 0.2", "--tuner vera --tuner-arguments r=64 d_initial=0.2"),
        ("--sft_type fourierft --fourier_n_frequency 9", "--tuner fourierft --tuner-arguments n_frequency=9"),
        ("--tuner_type bone", "--tuner miss"),
        ("--torch_dtype bfloat16 --attn_impl flash_attn", "--precision bf16 --attn flash_attention_2"),
        ("--truncation_strategy delete --loss_scale all", "--truncation drop --loss all"),
        ("--strict", "--bad-rows stop"),
        ("--strict false --split_dataset_ratio 0.1", "--bad-rows skip --val-split 0.1"),
        ("--deepspeed zero2 --lr_scheduler_type linear", "--stage 2 --lr-scheduler linear"),
        ("--deepspeed zero2_offload", "--stage 2 --offload optimizer"),
        ("--deepspeed zero3_offload", "--stage 3 --offload all"),
        ("--gradient_checkpointing_kwargs '{\"use_reentrant\": true}'", "--checkpointing-reentrant yes"),
        ("--bf16 true --fp16 false", "--precision bf16"),
        ("--torch_dtype float16 --save_only_model true", "--precision fp16 --save-only-model"),
        ("--fp16 true", "--precision fp16"),
        (
            "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 1e-6}' --warmup_steps 3",
            "--lr-scheduler cosine_with_min_lr --lr-scheduler-kwargs min_lr=1e-6 --warmup-steps 3",
        ),
        (
            "--adam_beta1 0.8 --adam_beta2 0.95 --adam_epsilon 1e-6",
            "--adam-beta1 0.8 --adam-beta2 0.95 --adam-epsilon 1e-6",
        ),
        ('--columns \'{"question": "query", "a": "response"}\'', "--columns query=question response=a"),
        ('--columns \'{"label": "_", "messages": "_", "new": "messages"}\'', "--columns messages=new"),
        ('--columns \'{"label": "_"}\'', ""),
        ("--group_by_length true", "--group-by-length"),
        ("--train_sampling_strategy group_by_length", "--group-by-length"),
        ("--train_sampling_strategy random", ""),
        ("--torch_compile true", "--compile"),
        ("--optim adamw_bnb_8bit", "--optimizer adamw_8bit"),
        ("--optim adafactor", "--optimizer adafactor"),
        (
            "--use_galore true --galore_rank 64 --galore_scale 0.25 --galore_proj_type std",
            "--optimizer galore --optimizer-arguments rank=64 scale=0.25",
        ),
        ("--optimizer muon --optim adamw_torch", "--optimizer muon"),
        ("--loss_scale last_round", "--loss last_round"),
        ("--loss_scale ignore_empty_think", "--loss answer+ignore_empty_think"),
        ("--loss_scale default+ignore_empty_think", "--loss answer+ignore_empty_think"),
        ("--loss_scale last_round+ignore_empty_think", "--loss last_round+ignore_empty_think"),
        ("--loss_scale hermes", "--loss answer --token-weights hermes"),
        ("--agent_template react_en --response_prefix ''", "--agent-template react_en"),
        ("--loss_scale default+react --loss_type loss_scale", "--loss answer --token-weights react"),
        (
            "--loss_scale last_round+hermes+ignore_empty_think+ignore_think_prefix",
            "--loss last_round+ignore_empty_think --token-weights hermes ignore_think_prefix",
        ),
        (
            "--streaming true --max_steps 9 --shuffle_buffer_size 50 --enable_dft_loss true --full_determinism true"
            " --max_epochs 2",
            "--streaming --max-steps 9 --shuffle-buffer-size 50 --loss-type dft --deterministic --max-epochs 2",
        ),
        ("--loss_type mine --enable_dft_loss false", "--loss mine"),
        ("--loss_type dft --overwrite_output_dir true", "--loss-type dft --overwrite"),
        ("--new_special_tokens <a> <b> --max_model_len 9000", "--new-special-tokens <a> <b> --max-model-len 9000"),
        ("--rope_scaling yarn", "--rope-scaling type=yarn"),
        ('--rope_scaling \'{"rope_type": "yarn", "factor": 2.0}\'', "--rope-scaling type=yarn,factor=2.0"),
        ("--logging_dir x --run_name y --disable_tqdm true --model_revision none --num_beams 1 --eval_delay 0", ""),
        ("--streaming false --packing false --freeze_vit false --optim adamw_torch", ""),
        ("--freeze_vit true --freeze_aligner true --freeze_llm false", "--freeze vision,audio,aligner"),
        (
            "--task_type seq_cls --num_labels 3 --problem_type multi_label_classification --use_chat_template false",
            "--task seq_cls --num-labels 3 --problem-type multi_label_classification --plain",
        ),
        ("--task_type causal_lm --use_chat_template true", ""),
        ("--task_type embedding --loss_type infonce", "--task embedding --loss infonce"),
        ("--task_type reranker --loss_type listwise_reranker", "--task reranker --loss listwise"),
        (
            "--task_type generative_reranker --loss_type pointwise_reranker",
            "--task generative_reranker --loss pointwise",
        ),
        ("--task_type reranker --loss_type listwise_generative_reranker", "--task reranker --loss listwise"),
        (
            "--task_type generative_reranker --loss_type generative_reranker --label_names labels",
            "--task generative_reranker --loss pointwise",
        ),
        ("--max_steps -1 --num_train_epochs 2 --vit_gradient_checkpointing false", "--epochs 2"),
        ("--task_type seq_cls --label_names labels others", "--task seq_cls --label-names labels others"),
        ("--vit_lr 1e-5 --aligner_lr 2e-5", "--part-learning-rates vision=1e-5,audio=1e-5,aligner=2e-5"),
    ],
)
def test_an_option_means_what_it_means_there(theirs, ours):
    assert sft.parse(shlex.split(theirs))[0] == sft.parse(shlex.split(ours))[0]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            "--model tiny --model_revision v2",
            "--model-revision v2 is for models from the hub, and --model tiny is not one",
        ),
        ("--adapters run", "--adapters run: there is no such folder. Name a run of adapters"),
        ("--agent_template llama3", "--agent-template llama3: that is the format of a model family, whose own chat"),
        (
            "--agent_template qwen_en_parallel",
            "--agent-template qwen_en_parallel: use qwen_en, which also writes several",
        ),
        ("--agent_template toolbench", "--agent-template toolbench: must be one of hermes, react_en"),
        ("--reward_adapters run", "equivalent here; merge them with 'shardproof export RUN FOLDER'"),
        ("--resume_only_model true", "equivalent here; run 'shardproof export CHECKPOINT FOLDER'"),
        ("--reft_rank 8", "There is no option --reft-rank. It belongs to a tuner of ms-swift that does not exist here"),
        ("--swanlab_mode local", "from its own variables: SWANLAB_PROJ_NAME"),
        ("--lmdeploy_tp 2", "or by a separate vLLM server"),
        ("--num_beams 2", "'shardproof infer' generates"),
        ("--temperature 0.7", "'shardproof infer' generates"),
        ('--columns \'{"a": "query", "b": "query"}\'', "--columns: 'a' and 'b' are both mapped to 'query'."),
        ('--columns \'{"history": "-"}\'', "'history' is read if a row has it. Remove that column from the rows."),
        ("--rope_scaling {oh", "--rope-scaling {oh is not a JSON object"),
        ("--task_type prm", "--task-type prm: an ms-swift option without an equivalent here; it takes causal_lm, seq_"),
        ("--deepspeed zero7", "neither one of zero0 to zero3"),
        ("--epochs 3 --num_train_epochs 3", "--epochs and --num-train-epochs are the same option"),
        ("--stage 1 --deepspeed zero3", "--stage and --deepspeed are the same option"),
        ("--gradient_checkpointing_kwargs on", "not a JSON object"),
        ("--num_train_epoch 3", "Did you mean --num-train-epochs?"),
        ("--stage 3 --stage 2", "--stage is given twice"),
        ("--dataset a --dataset b", "Give it once, with all its values"),
        ("--beta 0.1", "--beta is an option of 'shardproof rlhf'"),
        ("--vllm_gpu_memory_utilization 0.9", "is an option of 'shardproof rlhf'"),
        ("--vllm_max_num_seqs 2", "vllm serve"),
        ("--lr 1e-4", "--learning-rate"),
        ("--galore_quantization true", "--galore-quantization true: an ms-swift option without an equivalent here"),
        (
            "--response_prefix '<think>'",
            "'shardproof infer' has it; in training the template writes the start of every",
        ),
        ("--train_dataloader_shuffle false", "equivalent here; rows are always shuffled in each epoch"),
        (
            "--train_sampling_strategy sequential",
            "it takes random and group_by_length: rows are always shuffled",
        ),
        ("--norm_bbox none", "equivalent here; boxes are written in thousandths or in pixels"),
        (
            "--loss_scale mine",
            "--loss-scale mine: an ms-swift option without an equivalent here; 'shardproof sft' takes",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(theirs, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        sft.parse(shlex.split(theirs))


@pytest.mark.parametrize("given", ["--packing", "--packing true"])
def test_rlhf_says_whose_option_packing_is(given):
    with pytest.raises(ConfigError, match=f"^{given}: an ms-swift option without .*; only 'shardproof sft' packs"):
        training.parse(RlhfConfig, "", ["--rlhf_type", "dpo", *given.split()])


@pytest.mark.parametrize("kind", ["dpo", "gkd --teacher_model t"])
def test_rows_of_rlhf_that_are_packed_there_go_without_padding(kind):
    said = f"swift rlhf --rlhf_type {kind} --model m --dataset d --packing"
    command, notes, missing = swift.translate(f"{said} true")
    assert not missing
    assert "--packing" not in command
    assert "--padding-free true" in command
    assert any("--per-device-batch-size rows, in ms-swift as many as fill --max-length" in note for note in notes)
    assert "padding" not in swift.translate(f"{said} false")[0]


def test_answers_that_processes_share_are_brought_over():
    said = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs format --sequence_parallel_size 4"
    command, notes, missing = swift.translate(f"{said} --dataloader_drop_last true --padding_free true")
    assert not missing
    assert "--sequence-parallel 4" in command
    assert {"--drop-last", "--padding-free"} & {*options(command)} == set()
    assert "--drop-last true is left out: it would have no effect" in notes


def test_experts_are_balanced_by_the_weight_that_is_given():
    for given in ("0", "0.01"):
        config, _ = training.parse(RlhfConfig, "", ["--rlhf_type", "dpo", "--router_aux_loss_coef", given])
        assert config.router_aux_loss_coef == float(given)


@pytest.mark.parametrize(("theirs", "ours"), [("true", "group"), ("false", "none"), ("batch", "batch")])
def test_rewards_are_scaled_as_they_are_there(theirs, ours):
    config, _ = training.parse(RlhfConfig, "", ["--rlhf_type", "grpo", "--scale_rewards", theirs])
    assert config.scale_rewards == ours


def test_advantages_have_the_names_that_they_have_there():
    said = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs format --beta 0.001 --kl_in_reward true"
    command, _, missing = swift.translate(f"{said} --advantage_estimator reinforce_plus_plus --scale_rewards batch")
    assert missing == []
    expected = {"--advantage-estimator": "reinforce_plus_plus", "--kl-in-reward": "true", "--scale-rewards": "batch"}
    assert expected.items() <= options(command).items()
    config, _ = training.parse(RlhfConfig, "", ["--rlhf_type", "grpo", "--scale_rewards", "gdpo"])
    assert config.trl_arguments == {"multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--multi_turn_scheduler math_tip_trick", "turn the scheduler into a class that grpo's answers call"),
        ("--max_turns 3", "--max-turns N then becomes --max-tool-calling-iterations N-1"),
        ("--gym_env sudoku", "--environments FILE.py:CLASS lets answers of grpo act in a world"),
        ("--reward_model_plugin genrm", "for a generative judge write a function, --reward-funcs FILE.py"),
        ("--teacher_tag_key subject", "only one teacher is supported: --teacher-model-server takes its address"),
    ],
)
def test_what_is_done_in_another_way_is_told(said, told):
    *_, (reason,) = swift.translate(f"swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs format {said}")
    assert told in reason


def test_texts_at_which_answers_end_are_brought_over():
    command, _, missing = swift.translate(
        "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs format --stop_words Observation: '</end>'"
    )
    assert missing == []
    assert options(command)["--stop-words"] == "Observation: '</end>'"


def test_losses_of_dpo_are_its_own_where_rpo_adds_nothing():
    said = "swift rlhf --rlhf_type dpo --model m --dataset d --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1"
    command, _, missing = swift.translate(f"{said} --rpo_alpha 0.0")
    assert missing == []
    assert "--loss-type sigmoid bco_pair sft" in command.replace(" \\\n   ", "")


def test_a_student_whose_answers_a_vllm_writes_is_brought_over():
    said = "swift rlhf --rlhf_type gkd --model m --teacher_model t --dataset d --use_vllm true --vllm_mode colocate"
    command, _, missing = swift.translate(f"{said} --lmbda 1 --sleep_level 1 --vllm_max_model_len 4096 --sft_alpha 0")
    assert missing == []
    assert {"--use-vllm": "true", "--vllm-sleep": "yes", "--lmbda": "1"}.items() <= options(command).items()


def test_a_teacher_of_tokens_is_brought_over():
    said = "swift rlhf --rlhf_type grpo --model m --dataset d --teacher_model t --num_generations 1 --use_vllm true"
    command, notes, missing = swift.translate(
        f"{said} --vllm_limit_mm_per_prompt '{{}}' --log_rollout_offpolicy_metrics true"
    )
    assert missing == []
    assert {"--teacher-model": "t", "--num-generations": "1"}.items() <= options(command).items()
    assert any(note.startswith("--log-rollout-offpolicy-metrics is left out") for note in notes)


def test_what_is_done_in_towers_is_not_said_to_be_left_out():
    _, notes, missing = swift.translate("swift sft --model m --dataset d --vit_gradient_checkpointing false")
    assert missing == []
    told = (
        "--vit-gradient-checkpointing is left out: --gradient-checkpointing covers towers, too, and does not change"
        " results"
    )
    assert told in notes


def test_rlhf_says_how_a_teacher_is_sharded():
    asked = ["--rlhf_type", "gkd", "--teacher_model", "t", "--teacher_deepspeed"]
    config = training.parse(RlhfConfig, "", [*asked, "zero3"])[0]
    assert config.model_stages == {"teacher_model": 3}
    assert config.model_offloads == {}
    config = training.parse(RlhfConfig, "", [*asked, "zero3_offload"])[0]
    assert (config.model_stages, config.model_offloads) == ({"teacher_model": 3}, {"teacher_model": "all"})
    config = training.parse(RlhfConfig, "", [*asked, "zero2_offload", "--offload_teacher_model", "true"])[0]
    assert (config.model_stages, config.model_offloads) == ({"teacher_model": 2}, {"teacher_model": "all"})
    with pytest.raises(ConfigError, match="--model-offloads teacher_model=all"):
        training.parse(RlhfConfig, "", [*asked, "ds.json"])


def test_a_server_has_the_names_that_it_has_there():
    theirs = "--rlhf_type grpo --use_vllm true --vllm_mode server --vllm_server_host node7 --vllm_server_port 8001"
    config = training.parse(RlhfConfig, "", theirs.split())[0]
    assert (config.use_vllm, config.vllm_address) == (True, "http://node7:8001")
    config = training.parse(RlhfConfig, "", ["--rlhf_type", "grpo", "--vllm_server_base_url", "http://node7:8001/"])[0]
    assert config.vllm_address == "http://node7:8001"


def test_variants_have_the_names_that_they_have_in_trl():
    theirs = "--rlhf_type grpo --loss_type sapo --tau_pos 1 --tau_neg 1.05 --top_entropy_quantile 0.2"
    config = training.parse(RlhfConfig, "", theirs.split())[0]
    assert config.trl_arguments == {
        "sapo_temperature_pos": 1,
        "sapo_temperature_neg": 1.05,
        "top_entropy_quantile": 0.2,
    }


def test_what_decides_nothing_is_said_in_one_line(capfd):
    sft.parse(["--ddp_find_unused_parameters", "true", "--tuner_backend", "peft"])
    (line,) = capfd.readouterr().err.splitlines()
    assert "--ddp-find-unused-parameters (parameters may always be unused)" in line
    assert "--tuner-backend" in line


def test_what_changes_no_number_is_said_and_taken(capfd):
    theirs = "--use_logits_to_keep true --packing false"
    assert sft.parse(theirs.split())[0] == sft.parse([])[0]
    assert "--use-logits-to-keep" in capfd.readouterr().err
    assert sft.parse(["--use_liger_kernel", "true"])[0].liger_kernel


@pytest.mark.parametrize(("level", "sleeps"), [("0", False), ("1", True), ("2", True)])
def test_a_vllm_in_the_processes_has_the_names_that_it_has_there(level, sleeps):
    theirs = "swift rlhf --rlhf_type grpo --model a --dataset b --reward_funcs format --use_vllm true"
    theirs += " --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --vllm_max_model_len 8192"
    theirs += f" --vllm_tensor_parallel_size 2 --sleep_level {level} --offload_model true --offload_optimizer true"
    command, notes, missing = swift.translate(f"{theirs} --vllm_enable_lora true")
    assert missing == []
    assert sum("vLLM" in note for note in notes) == 3
    config = training.parse(RlhfConfig, "", shlex.split(command.replace("\\\n", ""))[2:])[0]
    assert (config.vllm_mode, config.vllm_sleep) == ("colocate", sleeps)
    assert (config.vllm_gpu_memory_utilization, config.vllm_max_model_len) == (0.4, 8192)
    assert config.vllm_tensor_parallel_size == 2


@pytest.mark.parametrize(("device", "offload"), [("none", None), ("cpu", "optimizer")])
def test_stage_and_offload_of_a_deepspeed_file(tmp_path, device, offload):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}))
    config = sft.parse(["--deepspeed", str(file)])[0]
    assert (config.stage, config.offload) == (2, offload)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python train.py", "no 'swift sft'"),
        (
            "swift deploy --model x",
            "In place of 'swift deploy': 'shardproof export RUN FOLDER', then 'vllm serve FOLDER'",
        ),
        ("swift sft run.yaml", "There is no file run.yaml"),
        ("swift sft --dataset a.jsonl", "There is no --model in this command"),
        ("swift sft --model a", "There is no --dataset in this command"),
        (
            "swift sft --model a --dataset b --batch_size x",
            "--per-device-batch-size x: should be a whole",
        ),
        ("NPROC_PER_NODE=$N swift sft --model a --dataset b", r"NPROC_PER_NODE=\$N: the script does not define \$N\."),
        ("swift sft --model 'x", "not a shell command"),
    ],
)
def test_a_text_without_a_command(text, message):
    with pytest.raises(ConfigError, match=message):
        swift.run([text])


def test_what_has_no_equivalent_is_counted_in_the_exit_code(capfd):
    words = "swift sft --model x --dataset y --galore_quantization true --nosuch 1 --lora_rnak 8 --vllm_max_num_seqs 2"
    assert swift.run(words.split()) == 1
    out, err = capfd.readouterr()
    assert "--lora-rnak 8: unknown. Did you mean --lora-rank?" in err
    assert "vllm serve" in err
    assert out.startswith("shardproof sft")
    assert "--galore-quantization true" in err
    assert "--nosuch 1: unknown" in err


def test_what_is_best_noise_names_and_thinking():
    command, _, missing = swift.translate(
        "swift sft --model m --dataset d --tuner_type full --load_best_model_at_end true --metric_for_best_model acc"
        " --early_stop_interval 3 --eval_steps 5 --save_steps 5 --neftune_noise_alpha 5 --freeze_parameters model.embed"
        " --trainable_parameters_regex 'layers.[01]' --enable_thinking false"
    )
    assert missing == []
    found = options(command)
    assert (found["--best-metric"], found["--early-stop"], found["--keep-best"]) == ("acc", "3", "true")
    assert (found["--neftune-noise-alpha"], found["--freeze-parameters"]) == ("5", "model.embed")
    assert (found["--trainable-parameters"], found["--template-variables"]) == (
        "'layers.[01]'",
        "enable_thinking=false",
    )


def blocks() -> list[tuple[str, str]]:
    """The code blocks of the page: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_the_examples_of_the_page(capfd):
    (_, run), (_, asked), (_, answer) = blocks()[:3]
    config, _ = sft.parse(shlex.split(run.replace("\\\n", " "))[2:])
    assert (config.stage, config.tuner, config.precision, config.checkpointing_reentrant) == (3, "lora", "bf16", True)
    assert swift.run(shlex.split(asked)[2:]) == 0
    assert capfd.readouterr().out == answer


def test_variables_that_swift_users_set(monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert sft.parse([])[0].nproc == 2
    assert sft.parse(["--nproc", "3"])[0].nproc == 3
    monkeypatch.setenv("NPROC_PER_NODE", "many")
    with pytest.raises(ConfigError, match="NPROC_PER_NODE=many: should be a whole number"):
        sft.parse([])


RLHF = """NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model ./m --dataset pairs.jsonl --beta 0.1 --train_type full
--deepspeed zero3 --max_length 512 --rpo_alpha 0.1 --learning_rate 5e-7"""


def test_a_command_of_rlhf():
    command, _, missing = swift.translate(RLHF.replace("\n", " "))
    assert missing == []
    found = options(command)
    assert found["--rlhf-type"] == "dpo"
    assert found["--beta"] == "0.1"
    assert found["--nproc"] == "2"
    config, _ = training.parse(RlhfConfig, "", shlex.split(command.replace("\\\n", " "))[2:])
    assert (config.rlhf_type, config.stage, config.learning_rate) == ("dpo", 3, 5e-7)


@pytest.mark.parametrize(
    ("given", "micro"), [("", None), ("--per_device_train_batch_size 1", "2"), ("--per_device_train_batch_size 4", "4")]
)
def test_rows_a_step_of_a_deepspeed_file_are_those_of_kto(given, micro):
    line = "swift rlhf --rlhf_type kto --model m --dataset d --deepspeed '{\"train_batch_size\": 16}'"
    command, _, missing = swift.translate(f"{line} {given}")
    found = options(command)
    assert (missing, found["--global-batch-size"], found.get("--per-device-batch-size")) == ([], "16", micro)
    assert "--gradient-accumulation-steps" not in found


def test_what_is_printed_of_rlhf_is_taken():
    """KTO wants two rows in a micro-batch, and an algorithm refuses what means nothing to it."""
    said = "swift rlhf --rlhf_type {} --model m --dataset d --per_device_train_batch_size 1"
    command, notes, missing = swift.translate(said.format("kto") + " --gradient_accumulation_steps 8")
    found = options(command)
    assert (found["--per-device-batch-size"], found["--gradient-accumulation-steps"]) == ("2", "4")
    assert missing == []
    assert any("kto" in note for note in notes)
    assert swift.translate(said.format("dpo --use_vllm false"))[2] == []
    command, notes, missing = swift.translate(said.format("ppo --reward_model r --use_vllm true"))
    assert missing == ["--use-vllm true: does not apply to --rlhf-type ppo"]
    config, _ = training.parse(RlhfConfig, "", shlex.split(command.replace("\\\n", " "))[2:])
    check_algorithm(config, config.batch(1))


def test_two_options_that_are_one_here_agree_or_are_named():
    """Swift adds up losses, or has the last word of two; none is dropped in silence."""
    said = "swift rlhf --rlhf_type dpo --model m --dataset d "
    command, _, missing = swift.translate(said + "--torch_dtype bfloat16 --bf16 true")
    assert missing == []
    assert options(command)["--precision"] == "bf16"
    for both in ("--loss_type ipo --rpo_alpha 0.1", "--rpo_alpha 0.1 --loss_type ipo"):
        *_, (reason,) = swift.translate(said + both)
        assert "--loss-type has two values: " in reason
        assert "--loss-type ipo sft --loss-weights 1 X" in reason
        with pytest.raises(ConfigError, match="In place of --rpo-alpha X, give all losses"):
            training.parse(RlhfConfig, "", ["--rlhf_type", "dpo", *both.split()])
    *_, (reason,) = swift.translate(said + "--torch_dtype float16 --bf16 true")
    assert reason == "--precision has two values: --torch-dtype says fp16, --bf16 says bf16. Leave one out."


def test_what_is_refused_together_is_told():
    *_, (reason,) = swift.translate(
        "swift sft --model m --dataset d --sequence_parallel_size 2 --full_determinism true"
    )
    assert reason.startswith("this command would be refused: --sequence-parallel and --deterministic: ")


def test_rows_that_are_cut_over_processes_take_the_attention_that_they_can():
    said = "swift sft --model m --dataset d --sequence_parallel_size 2 --attn_impl flash_attn --padding_free true"
    command, notes, missing = swift.translate(said)
    assert (missing, {"--attn", "--padding-free"} & {*options(command)}) == ([], set())
    assert any(note.startswith("--attn flash_attention_2 is left out: ") for note in notes)
    assert any(note.startswith("--padding-free true is left out: ") for note in notes)
    said = "swift sft --model m --dataset d --sequence_parallel_size 2 --packing true --use_liger_kernel true"
    command, notes, missing = swift.translate(said)
    assert not missing
    assert "--chunked-loss yes" in command
    assert "--liger-kernel" not in command


def test_names_that_rows_leave_open_are_filled_in():
    """A model would learn that it is called {{NAME}}."""
    given = ["--dataset", "MS::swift/self-cognition#500", "--model_author", "me", "--model_name", "小黄", "robot"]
    command, _, missing = swift.translate(shlex.join(["swift", "sft", "--model", "m", *given]))
    assert not missing
    assert "--model-author me" in command
    assert f"--model-name {shlex.quote('小黄')} robot" in command
    config, _ = sft.parse(given)
    assert (config.model_name, config.model_author) == (["小黄", "robot"], ["me"])


@pytest.mark.parametrize("how", ["run.yaml", "run.json", "--config run.yaml"])
def test_a_file_of_options_is_read_as_the_command_that_it_is(how: str, tmp_path: Path, monkeypatch) -> None:
    """What stands on the command line wins, and so does a variable in front of it."""
    monkeypatch.chdir(tmp_path)
    said = {"model": "m", "dataset": ["a", "b#5"], "learning_rate": 1e-5, "bf16": True, "num_train_epochs": 1}
    said["ENV"] = {"MAX_PIXELS": "1000", "ROOT_IMAGE_DIR": "there"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    (tmp_path / "run.json").write_text(json.dumps(said))
    command, _, missing = swift.translate(f"MAX_PIXELS=500 swift sft {how} --num_train_epochs 2")
    words = command.replace("\\\n", " ")
    assert not missing
    for part in ("--model m", "--dataset a 'b#5'", "--learning-rate 1e-05", "--precision bf16", "--epochs 2"):
        assert part in words
    assert "--max-pixels 500" in words
    assert "--media-root there" in words
    assert "--lora-rank 8" in words  # a default of Swift's


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_dollars_of_a_file_stand_for_themselves(tmp_path: Path, name: str) -> None:
    """No shell reads it. JSON may be written with tabs, and a character as two halves."""
    said = {"model": "m", "dataset": "a", "system": "\U0001f600 $5 $(x)", "ENV": {"ROOT_IMAGE_DIR": "$a"}}
    file = tmp_path / name
    file.write_text(json.dumps(said, indent="\t") if name == "run.json" else yaml.safe_dump(said))
    found = options(swift.translate(f"swift sft {file}")[0])
    assert (found["--system"], found["--media-root"]) == ("'\U0001f600 $5 $(x)'", "'$a'")
    file.write_text(json.dumps({**said, "system": "${x}"}))
    with pytest.raises(ConfigError, match="does not define"):
        swift.translate(f"swift sft {file}")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("run.yaml", "model: m\nENV: [a]\n", "ENV holds variables by their names"),
        ("run.json", '{"model": ', "run.json is not a JSON file"),
        ("run.json", "[1]", "must hold options"),
    ],
)
def test_a_file_that_holds_something_else_is_told(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        swift.translate(f"swift sft {tmp_path / name}")
    with pytest.raises(ConfigError, match="--config needs a file of options"):
        swift.translate("swift sft --config")


def test_a_file_that_is_not_there_or_says_what_is_not_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file train.yaml"):
        swift.translate("swift sft --config train.yaml --model a")
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndataset: a\nfreeze_parameters_ratio: 0.5\n")
    *_, (reason,) = swift.translate(f"swift sft {file}")
    assert reason.startswith("--freeze-parameters-ratio 0.5: an ms-swift option without an equivalent")


@pytest.mark.parametrize(
    ("groups", "nproc"),
    [
        (
            '{"nproc_per_node": 4, "default": {"device": "GPU", "ranks": "list(range(0, 4))", "workers": ["default"]}}',
            "4",
        ),
        ('{"all": {"device": "GPU", "ranks": 8, "workers": ["default"]}}', "8"),
        ('{"all": {"ranks": [0, 1], "workers": ["default"]}}', "2"),
    ],
)
def test_one_group_of_processes_on_ray_is_its_launcher(groups: str, nproc: str) -> None:
    command, _, missing = swift.translate(f"swift sft --model m --dataset a --use_ray true --device_groups '{groups}'")
    assert not missing
    assert "--launcher ray" in command
    assert f"--nproc {nproc} " in command


@pytest.mark.parametrize("groups", ["{}", "x", '{"a": {"ranks": 1, "workers": ["rollout"]}}'])
def test_groups_for_models_of_their_own_are_not_here(groups: str) -> None:
    *_, missing = swift.translate(f"swift rlhf --rlhf_type dpo --model m --dataset a --device_groups '{groups}'")
    assert "--launcher ray --nproc N" in missing[0]


SCRIPT = """#!/bin/bash
# a comment that isn't closed
export PATH=$PATH:/opt/bin
MODEL=./m; N=2   # two
mkdir -p logs && cd .
NPROC_PER_NODE=$N nohup swift sft \\
    --model ${MODEL} \\
    --dataset 'a b.jsonl#5' \\
    --max_steps 2 --train_type full --lora_rank 8 \\
    # in between
    --system "a > b | c # d" \\
    --output_dir out 2>&1 | tee logs/run.log &
echo started
"""


def test_a_text_of_several_lines_with_marks_of_the_shell():
    script = """# isn't read
PROMPT="Give the number after ####. For example:
#### 42"   # don't read this either
swift sft --model a --dataset b --system "$PROMPT" # nor 'this
"""
    command, *_ = swift.translate(script)
    assert shlex.split(command.replace("\\\n", " "))[7] == "Give the number after ####. For example:\n#### 42"


def test_a_script_around_the_command():
    command, notes, missing = swift.translate(SCRIPT)
    assert missing == []
    found = options(command)
    assert (found["--model"], found["--nproc"], found["--max-steps"]) == ("./m", "2", "2")
    assert found["--dataset"] == "'a b.jsonl#5'"
    assert found["--system"] == "'a > b | c # d'"
    assert found["--output-dir"] == "out"
    assert "--lora-rank" not in found
    assert any("nohup" in note for note in notes)
    assert any("--lora-rank 8 is left out" in note for note in notes)


def test_a_value_without_quotes_is_as_many_words_as_it_has():
    script = """DATA="a.jsonl b.jsonl"; NONE=
ARGS="--learning_rate 1e-5
  --num_train_epochs 2 $NONE"
SAID="two words"
COPY=$SAID
swift sft --model m --dataset $DATA $NONE --val_dataset v/$DATA $ARGS --system "$COPY"
"""
    command, _, missing = swift.translate(script)
    assert missing == []
    found = options(command)
    assert (found["--dataset"], found["--val-dataset"]) == ("a.jsonl b.jsonl", "v/a.jsonl b.jsonl")
    assert (found["--learning-rate"], found["--epochs"], found["--system"]) == ("1e-5", "2", "'two words'")
    for unknown in ("$X", "${X}", "${1:-x}", "${M:-x y}"):
        with pytest.raises(ConfigError, match=rf"the script does not define {re.escape(unknown[:4])}"):
            swift.translate(f"swift sft --model m --dataset {unknown}")


@pytest.mark.parametrize(
    ("around", "steps"),
    [
        ("N=4\n{} --max_steps $(expr 16 / $N)", "4"),
        ("N=4; {} --max_steps $(expr 16 / 8 \\* $N) --seed 1", "8"),
        ("N=3\n{} --max_steps $((16 / N + (2 - 1)))", "6"),
        ('{} --max_steps "$(expr 7 % 4)"', "3"),
        ("{} --max_steps `expr 7 - 2`", "5"),
    ],
)
def test_sums_that_the_shell_does_are_done(around, steps):
    command, *_ = swift.translate(around.replace("{}", "swift sft --model a --dataset b"))
    assert options(command)["--max-steps"] == steps


@pytest.mark.parametrize("sum_", ["$(expr 16 / $N)", "$((16 / 0))", "$((1 +))", "$(($(nproc) + 1))", "$(nproc)"])
def test_a_sum_that_the_text_does_not_say_is_named(sum_):
    with pytest.raises(ConfigError, match=r"--max-steps \$.*the script does not define \$\("):
        swift.translate(f"swift sft --model a --dataset b --max_steps {sum_}")


@pytest.mark.parametrize("around", ["> log 2>&1 &", "&> log", ">>log", "2> err < in", "| tee log", "; ls -l"])
def test_what_the_shell_does_is_no_value(around):
    command, *_ = swift.translate(f"swift sft --model a --dataset b --max_steps 2 {around}")
    assert options(command)["--max-steps"] == "2"


def test_the_defaults_of_grpo(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    line = (
        f"swift rlhf --rlhf_type grpo --model {tmp_path} --dataset p.jsonl --reward_funcs format --val_dataset v.jsonl"
    )
    command, notes, missing = swift.translate(line)
    assert missing == []
    found = options(command)
    assert (found["--gradient-accumulation-steps"], found["--num-generations"], found["--beta"]) == ("1", "8", "0.04")
    assert (found["--loss-type"], found["--top-p"], found["--top-k"]) == ("grpo", "0.9", "50")
    assert (found["--max-length"], found["--eval-steps"]) == ("4096", "500")
    assert notes == ["prompts longer than --max-length are left out here; ms-swift cuts off their beginning"]
    training.parse(RlhfConfig, "", shlex.split(command.replace("\\\n", " "))[2:])


OMNI = """
MAX_PIXELS=1003520 ENABLE_AUDIO_OUTPUT=0 swift sft --model Qwen/Qwen2.5-Omni-7B --dataset a.jsonl \\
    --train_type full --freeze_vit true --freeze_llm true --aligner_lr 1e-4
"""


def test_towers_are_frozen_as_they_are_there():
    command, _, missing = swift.translate(OMNI)
    assert missing == []
    found = options(command)
    assert sorted(found["--freeze"].split()) == ["aligner", "audio", "llm", "vision"]
    assert found["--part-learning-rates"] == "aligner=1e-4"
    assert (found["--max-pixels"], found["--enable-audio-output"]) == ("1003520", "0")
    assert "--freeze" not in options(swift.translate("swift sft --model Qwen/Qwen3-8B --dataset a.jsonl")[0])


def test_parts_of_a_model_of_text_are_left_out_as_they_say_nothing_there(tmp_path):
    said = f"swift sft --model {tmp_path} --dataset a.jsonl --freeze_llm true --freeze_vit true --vit_lr 1e-5"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    command, notes, missing = swift.translate(said)
    assert missing == []
    assert not {"--freeze", "--part-learning-rates"} & options(command).keys()
    assert sum("is a text model without such parts" in note for note in notes) == 2
    config.write_text('{"model_type": "qwen3_vl", "vision_config": {}, "text_config": {}}')
    assert options(swift.translate(said)[0])["--freeze"].split() == ["llm", "vision", "audio", "aligner"]


def test_adapters_that_are_named_go_to_towers_as_they_do_there():
    """There freezing says where `all-linear` goes, and nothing of names; here it is of names, too."""
    command = "swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --dataset a.jsonl"
    assert "--freeze" not in options(swift.translate(f"{command} --target_modules q_proj v_proj")[0])
    assert "--freeze" not in options(swift.translate(f"{command} --target_regex '.*visual.*qkv'")[0])
    found, notes, _ = swift.translate(f"{command} --target_modules q_proj --freeze_vit true")
    assert "--freeze" not in options(found)
    assert any("ms-swift freezes towers for all-linear alone" in note for note in notes)
    every = options(swift.translate(f"{command} --target_modules all-linear")[0])
    assert sorted(every["--freeze"].split()) == ["aligner", "audio", "vision"]
    full = options(swift.translate(f"{command} --train_type full --target_modules q_proj")[0])
    assert "--freeze" in full


def test_variables_are_options(monkeypatch):
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    monkeypatch.setenv("ENABLE_AUDIO_OUTPUT", "0")
    config, _ = sft.parse([])
    assert (config.max_pixels, config.enable_audio_output) == (1003520, False)
    assert sft.parse(["--max-pixels", "500", "--enable-audio-output"])[0].max_pixels == 500
    assert sft.parse(["--enable-audio-output"])[0].enable_audio_output is True


def test_variables_are_options_of_infer_too(monkeypatch):
    seen = []

    def look(config) -> None:
        seen.append(config)
        raise ConfigError("seen")

    monkeypatch.setattr(infer, "_check", look)
    for name, value in (("MAX_PIXELS", "500"), ("NPROC_PER_NODE", "2"), ("ROOT_IMAGE_DIR", "/pictures")):
        monkeypatch.setenv(name, value)
    for words in (["run"], ["run", "--dataset", "d.jsonl"], ["run", "--max-pixels", "9", "--nproc", "1"]):
        with pytest.raises(ConfigError, match="seen"):
            infer.run(words)
    asked, rows, given = seen
    assert (asked.max_pixels, asked.nproc, asked.media_root, rows.media_root) == (500, 2, None, "/pictures")
    assert (given.max_pixels, given.nproc) == (9, 1)
    monkeypatch.setenv("IMAGE_FACTOR", "28")
    with pytest.raises(ConfigError, match="The variable IMAGE_FACTOR=28"):
        infer.run(["run"])


def test_a_file_of_options_as_swift_gives_it(tmp_path, capfd):
    """Behind --config, under Swift's names."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\ntrain_type: lora\nnum_train_epochs: 2\ndeepspeed: zero3\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\npush_to_hub: false\ntarget_modules: [q_proj, v_proj]\nlr: 1\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:9: there is no option 'lr'. Here it is learning_rate."):
        sft.parse(["--config", str(file)])
    file.write_text(file.read_text().replace("lr: 1\n", ""))
    config, _ = sft.parse(["--config", str(file), "--epochs", "5"])
    assert (config.tuner, config.epochs, config.stage, config.target_modules) == ("lora", 5, 3, ["q_proj", "v_proj"])
    assert config.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert "push_to_hub" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="both name a file of options"):
        sft.parse([str(file), "--config", str(file)])


@pytest.mark.parametrize(
    "lines, on_a_line",
    [
        ("freeze_vit: true\nfreeze_aligner: true", "--freeze_vit true --freeze_aligner true"),
        ("vit_lr: 1e-5\naligner_lr: 2e-5", "--vit_lr 1e-5 --aligner_lr 2e-5"),
        ("max_steps: -1", "--max_steps -1"),
        ("label_names: [labels]", "--label_names labels"),
        ("rope_scaling: yarn\nmax_model_len: 9999", "--rope_scaling yarn --max_model_len 9999"),
        ("rope_scaling: {type: yarn, factor: 2}", "--rope-scaling type=yarn factor=2"),
        ('columns: \'{"question": "query"}\'', '--columns {"question":"query"}'),
        ("loss_type: infonce\ntask_type: embedding", "--loss_type infonce --task_type embedding"),
    ],
)
def test_a_file_means_what_the_command_line_does(tmp_path, lines: str, on_a_line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\ndataset: d\n{lines}\n")
    assert sft.parse([str(file)])[0] == sft.parse(["--model", "m", "--dataset", "d", *on_a_line.split()])[0]


def test_a_file_may_say_several_arguments_of_trl_and_is_refused_as_a_command_is(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndataset: d\nrlhf_type: grpo\ntop_entropy_quantile: 0.2\ntau_pos: 1.5\ntop_k: -1\n")
    config, _ = training.parse(RlhfConfig, "", [str(file)])
    assert config.trl_arguments == {"top_entropy_quantile": 0.2, "sapo_temperature_pos": 1.5}
    assert config.top_k == 0
    file.write_text("freeze_vit: true\nfreeze: [llm]\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: freeze is given for the second time"):
        sft.parse([str(file)])
    file.write_text("optimizer: lorap\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1: --optimizer lorap: .*--lorap-lr-ratio 16"):
        sft.parse([str(file)])


def test_a_system_message_in_a_file(tmp_path):
    file = tmp_path / "pirate.txt"
    with pytest.raises(ConfigError, match=r"pirate.txt ends in .txt, but cannot be read as a file: No such file"):
        sft.parse(["--system", str(file)])
    file.write_text("You are a pirate.\n")
    assert sft.parse(["--system", str(file)])[0].system == "You are a pirate.\n"
    assert sft.parse(["--system", "You write notes.txt\nand more.txt"])[0].system is not None


def test_line_ends_of_a_system_message_may_be_written(tmp_path):
    """As in ms-swift, in all commands; in a file of options YAML says what they are."""
    said = ["--system", r"Be brief.\nBe kind."]
    assert sft.parse(said)[0].system == "Be brief.\nBe kind."
    assert parse(infer.parser(), ["run", *said], command="infer")["system"] == "Be brief.\nBe kind."
    for theirs in ("sft --model m --dataset d", "infer --model m"):
        command, *_ = swift.translate(shlex.join(["swift", *theirs.split(), *said]))
        words = shlex.split(command.replace("\\\n", " "))
        assert words[words.index("--system") + 1] == said[1]
    (tmp_path / "run.yaml").write_text(r"system: 'Write \nabla.'")
    assert sft.parse([str(tmp_path / "run.yaml")])[0].system == r"Write \nabla."


def test_a_variable_that_asks_for_another_form_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("QWENVL_BBOX_FORMAT", "new")
    with pytest.raises(ConfigError, match=r"^The variable QWENVL_BBOX_FORMAT=new: here it is always 'legacy'"):
        sft.parse([])


def test_a_variable_that_nothing_reads_is_told(monkeypatch, tmp_path) -> None:
    """Names that anybody may use are refused in commands of Swift's only."""
    said = "swift sft --model m --dataset d.jsonl"
    unread = "VIDEO_MIN_PIXELS=256 N_MELS=80 INFONCE_HARD_NEGATIVES=3 USE_AUDIO_IN_VIDEO=0"
    *_, missing = swift.translate(f"{unread} {said}")
    assert [reason.partition(":")[0] for reason in missing] == [
        "VIDEO_MIN_PIXELS=256",
        "INFONCE_HARD_NEGATIVES=3",
        "N_MELS=80",
    ]
    assert "--max-pixels, --max-frame-pixels, --max-frames and --fps limit" in missing[0]
    monkeypatch.setenv("N_MELS", "80")
    sft.parse([])
    monkeypatch.setenv("VIDEO_MIN_PIXELS", "256")
    with pytest.raises(ConfigError, match=r"^The variable VIDEO_MIN_PIXELS=256: it is not read here; .*\. Unset it"):
        sft.parse([])


TOKENS = "IMAGE_MAX_TOKEN_NUM=1024 VIDEO_MAX_TOKEN_NUM=128 FPS_MAX_FRAMES=12 FPS=1"


def test_tokens_of_pictures_are_bounds_of_their_own() -> None:
    command, _, missing = swift.translate(f"{TOKENS} swift sft --model Qwen/Qwen3-VL-8B-Instruct --dataset d.jsonl")
    assert missing == []
    found = options(command)
    names = ("--max-image-tokens", "--max-frame-tokens", "--max-frames", "--fps")
    assert [found[name] for name in names] == ["1024", "128", "12", "1"]
    for rest in ("infer --adapters out", "export --model m --quant_method gptq --quant_bits 4 --dataset d.jsonl"):
        command, _, missing = swift.translate(f"IMAGE_MAX_TOKEN_NUM=1024 swift {rest}")
        assert (missing, "--max-image-tokens 1024" in command) == ([], True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "swift infer --adapters out/checkpoint-9 --stream true --temperature 0 --max_new_tokens 2048",
            "infer out/checkpoint-9 --stream true --temperature 0 --max-new-tokens 2048",
        ),
        (
            "NPROC_PER_NODE=2 MAX_PIXELS=1003520 swift infer --model org/m --val_dataset d.jsonl --max_batch_size 16",
            "infer MS::org/m --dataset d.jsonl --batch-size 16 --nproc 2 --max-pixels 1003520",
        ),
        ("swift export --adapters out/x --merge_lora true", "export out/x out/x-merged"),
        ("swift export --model m --output_dir out --torch_dtype bfloat16", "export m out --dtype bf16"),
    ],
)
def test_commands_about_finished_models_are_brought_over(theirs: str, ours: str) -> None:
    command, _, missing = swift.translate(theirs)
    assert (shlex.split(command), missing) == (["shardproof", *ours.split()], [])


def test_a_script_of_several_commands_is_brought_over_whole() -> None:
    """Each with the variables that were set above it, and what none has here told of all."""
    script = (
        "D=a.jsonl\nMAX_PIXELS=500 swift sft --model m --dataset $D --galore_quantization true\n"
        "D=b.jsonl\nswift infer --adapters out/x --val_dataset $D --logprobs true\n"
        "swift export --model m --output_dir out\n"
    )
    commands, _, missing = swift.translate(script)
    assert re.findall(r"^shardproof (\w+)", commands, re.MULTILINE) == ["sft", "infer", "export"]
    assert "--dataset a.jsonl" in commands
    assert [reason.split()[0] for reason in missing] == ["--galore-quantization", "--logprobs"]


def test_what_stands_in_front_of_a_command_is_its_own() -> None:
    """As the shell has it; what stands above is everybody's. What is to be known of all is told once."""
    script = (
        "export CUDA_VISIBLE_DEVICES=0,1\nB=4\nNPROC_PER_NODE=2 B=8 swift infer --model m --max_batch_size 1\n"
        "MAX_PIXELS=500 swift infer --model m --max_batch_size $B"
    )
    commands, notes, _ = swift.translate(script)
    of_two = ["shardproof infer m --batch-size 1 --nproc 2", "shardproof infer m --batch-size 4 --max-pixels 500"]
    assert commands.splitlines() == of_two
    assert notes.count("CUDA_VISIBLE_DEVICES=0,1 means the same here: put it before the command") == 1


def test_commands_that_are_not_read_are_told_beside_those_that_are() -> None:
    script = (
        "echo swift deploy\nswift infer --model m\nMAX_PIXELS=5 nohup swift deploy --model m &\n"
        "swift quantise --model m\npip install ms-swift"
    )
    *_, missing = swift.translate(script)
    assert [reason.partition(":")[0] for reason in missing] == ["In place of 'swift deploy'", "'swift quantise'"]


@pytest.mark.parametrize(("theirs", "ours"), [("true", None), ("pissa_niter_16", "pissa_niter_16"), ("olora", "olora")])
def test_adapters_begin_as_in_swift(theirs: str, ours: str | None) -> None:
    config, _ = training.parse(RlhfConfig, "", ["--rlhf_type", "dpo", "--tuner_type", "lora", "--init_weights", theirs])
    assert config.init_lora_weights == ours


@pytest.mark.parametrize(("theirs", "said"), [("false", "start at random"), ("lora-ga", "computed from rows of data")])
def test_adapters_that_cannot_begin_so_are_told(theirs: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training.parse(RlhfConfig, "", ["--rlhf_type", "dpo", "--tuner_type", "lora", "--init_weights", theirs])


def test_a_command_of_swift_behind_our_name(capsys) -> None:
    """`shardproof` put in front of `swift sft ...`, and no quotes."""
    told = []
    for words in ("swift sft --model m --dataset d.jsonl", "sft --model m --dataset d.jsonl"):
        assert swift.run(words.split()) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert told[0].startswith("shardproof sft")


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"There is no file train\.sh"):
        swift.run(["train.sh"])


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            "swift infer --model m --infer_backend sglang",
            "--infer-backend sglang: an ms-swift option without an equivalent here; --backend takes transformers and",
        ),
        (
            "swift infer --model m --max_new_token 5",
            "There is no option --max-new-token. Did you mean --max-new-tokens?",
        ),
        ("swift infer --model m --max_new_tokens none-of-it", "--max-new-tokens none-of-it"),
        ("swift infer --stream true", "RUN_DIR"),
        (
            "swift export --model m --quant_bits 4",
            "--quant-bits 4: an ms-swift option without an equivalent here; --quantize takes the kind",
        ),
        ("VIDEO_MIN_PIXELS=9 swift infer --model m", "VIDEO_MIN_PIXELS=9: it is not read here"),
    ],
)
def test_what_commands_about_finished_models_ask_for_in_vain_is_said(theirs: str, said: str) -> None:
    *_, (reason,) = swift.translate(theirs)
    assert said in reason


def test_variables_of_videos_are_options(monkeypatch) -> None:
    monkeypatch.setenv("VIDEO_MAX_PIXELS", "50176")
    monkeypatch.setenv("FPS", "1")  # of anybody's
    config, _ = sft.parse([])
    assert (config.max_frame_pixels, config.fps) == (50176, None)


def test_variables_of_libraries_and_the_place_of_files_are_kept() -> None:
    said = "swift sft --model m --dataset d.jsonl"
    command, notes, missing = swift.translate(f"PYTORCH_CUDA_ALLOC_CONF=x NCCL_DEBUG=INFO ROOT_IMAGE_DIR=/data {said}")
    assert missing == []
    assert options(command)["--media-root"] == "/data"
    assert [note.partition("=")[0] for note in notes if "put it before the command" in note] == [
        "PYTORCH_CUDA_ALLOC_CONF",
        "NCCL_DEBUG",
    ]


def test_temperatures_of_losses_are_one_option(monkeypatch) -> None:
    monkeypatch.setenv("LISTWISE_RERANKER_TEMPERATURE", "0.5")
    assert sft.parse(["--task", "reranker", "--loss", "listwise"])[0].loss_temperature == 0.5
    monkeypatch.setenv("INFONCE_TEMPERATURE", "0.05")
    both = "INFONCE_TEMPERATURE=0.05 and LISTWISE_RERANKER_TEMPERATURE=0.5 are the same option here, --loss-temperature"
    with pytest.raises(ConfigError, match=f"^The variables {both}. Unset one of them."):
        sft.parse([])
    monkeypatch.setenv("INFONCE_TEMPERATURE", "warm")
    monkeypatch.delenv("LISTWISE_RERANKER_TEMPERATURE")
    with pytest.raises(ConfigError, match=r"^The variable INFONCE_TEMPERATURE=warm"):
        sft.parse([])


@pytest.mark.parametrize("variable", ["MAX_PIXELS", "NPROC_PER_NODE", "ENABLE_AUDIO_OUTPUT"])
def test_a_variable_of_nonsense_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "lots")
    with pytest.raises(ConfigError, match=f"The variable {variable}=lots: should be"):
        sft.parse([])


@pytest.mark.parametrize(
    "command, instead",
    [
        ("deploy --adapters out/checkpoint-50", "vllm serve"),
        ("merge-lora --adapters out/checkpoint-50", "shardproof export RUN"),
    ],
)
def test_other_commands_of_swift_are_told_with_ours(command, instead):
    with pytest.raises(ConfigError, match=f"no 'swift sft', .* in this text\\.\n.*{instead}"):
        swift.run([f"CUDA_VISIBLE_DEVICES=0 swift {command}"])


def test_a_command_may_be_longer_than_the_name_of_a_file(capfd):
    assert swift.run([f"swift sft --model m --dataset {' '.join(f'rows-{i}.jsonl' for i in range(60))}"]) == 0
    assert "rows-59.jsonl" in capfd.readouterr().out


@pytest.mark.parametrize(("dataset", "told"), [("AI-ModelScope/alpaca-gpt4-data-zh#500", True), ("a.jsonl", False)])
def test_rows_of_a_hub_are_said_to_be_read_without_what_swifts_list_has_for_them(dataset, told):
    _, notes, _ = swift.translate(f"swift sft --model m --dataset {dataset}")
    assert any("are read unchanged" in note for note in notes) is told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--optimizer lorap --lorap_lr_ratio 16", "--optimizer lorap: an ms-swift option without an equivalent here"),
        ("--optimizer soap", "--optimizer soap: there is no such optimizer"),
        ("--use_galore true --galore_proj_type right", "--galore-proj-type right: an ms-swift option without an equiv"),
        ("--report_to neptune", "--report-to neptune: an ms-swift option without an equivalent here"),
        ("--report_to tensorboard neptune", "--report-to neptune"),
        ("--fsdp nowhere.json", "it is neither fsdp2 nor a JSON file"),
        ("--add_non_thinking_prefix false", "the model's own template decides about empty thoughts"),
        (
            "--task_type embedding --loss_type online_contrastive",
            "--loss-type online_contrastive: an ms-swift option",
        ),
        ("--loss_type focal", "--loss focal: there is no such loss"),
        ("--val_dataset v --eval_metric acc", "--metrics acc: there is no such metric"),
    ],
)
def test_names_that_nobody_has_are_told_before_the_command_is_run(given, told):
    command, _, missing = swift.translate(f"swift sft --model m --dataset d --train_type full {given}")
    assert len(missing) == 1, command
    assert told in missing[0]


def test_rewards_that_nobody_has_are_told_and_those_of_files_and_plugins_are_not():
    said = "swift rlhf --rlhf_type grpo --model m --dataset d --train_type full --reward_funcs accuracy"
    *_, missing = swift.translate(f"{said} cosine")
    assert ["--reward-funcs cosine: there is no such reward" in one for one in missing] == [True]
    assert swift.translate(f"{said} mine.py:long")[2] == []
    assert swift.translate(f"{said} cosine --external_plugins p.py")[2] == []
    own = "--external_plugins p.py --optimizer own --loss_type own"
    assert swift.translate(f"swift sft --model m --dataset d {own}")[2] == []


@pytest.mark.parametrize("more", ["", " --load_best_model_at_end false"])
def test_a_metric_that_nothing_goes_by_is_left_out(more):
    """There it decides nothing, and here the run would be refused for it."""
    said = f"swift sft --model m --dataset d --val_dataset v --metric_for_best_model acc{more}"
    command, notes, missing = swift.translate(said)
    assert missing == []
    assert "--best-metric" not in command
    assert "--best-metric acc is left out: it would have no effect" in notes
    assert "--best-metric acc" in swift.translate(f"{said.replace(' false', ' true')} --early_stop_interval 3")[0]


def test_pretraining_is_sft_without_a_template_that_learns_all():
    command, _, missing = swift.translate("swift pt --model m --dataset d.jsonl --packing true")
    assert not missing
    assert {"--plain": "yes", "--loss": "all", "--packing": "true"}.items() <= options(command).items()
    command, *_ = swift.translate("swift pt --model m --dataset d.jsonl --use_chat_template true --loss_scale default")
    assert "--plain" not in command
    assert "--loss answer" in command


@pytest.mark.parametrize(
    ("launcher", "variables", "expected"),
    [
        ("torchrun --nproc_per_node=4 swift/cli/sft.py", [], {"--nproc": "4", "--stage": "0"}),
        (
            "torchrun --nproc-per-node 4 --nnodes 2 --node_rank=1 --master_addr a /opt/swift/cli/sft.py",
            ["NNODES=2", "NODE_RANK=1", "MASTER_ADDR=a"],
            {"--nproc": "4"},
        ),
        ("python -m swift.cli.sft", [], {}),
        ("accelerate launch --num_processes 6 swift/cli/sft.py", [], {"--nproc": "6"}),
        ("accelerate launch --config_file {fsdp} swift/cli/sft.py", [], {"--nproc": "2", "--stage": "3"}),
        (
            "accelerate launch --config_file {zero} --machine_rank 1 swift/cli/sft.py",
            ["NNODES=2", "NODE_RANK=1", "MASTER_ADDR=10.0.0.1"],
            {"--nproc": "4", "--stage": "2", "--offload": "optimizer"},
        ),
        (
            "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 --gpu_ids 0,2 swift/cli/sft.py",
            ["CUDA_VISIBLE_DEVICES=0,2"],
            {"--nproc": "4", "--stage": "3"},
        ),
        (
            "accelerate launch --use_fsdp --fsdp_offload_params true --num_processes 2 -m swift.cli.sft",
            [],
            {"--stage": "3", "--offload": "all"},
        ),
        (
            "deepspeed --num_gpus 4 --num_nodes 2 --master_addr a swift/cli/sft.py",
            ["NNODES=2", "MASTER_ADDR=a"],
            {"--nproc": "4"},
        ),
        ("deepspeed --include localhost:1,3 swift/cli/sft.py", ["CUDA_VISIBLE_DEVICES=1,3"], {"--nproc": "2"}),
        (
            "torchrun --nproc_per_node 2 --nnodes 2 --rdzv_endpoint a:29 --max_restarts 3 swift/cli/sft.py",
            ["NNODES=2", "MASTER_ADDR=a", "MASTER_PORT=29"],
            {"--max-restarts": "3"},
        ),
    ],
)
def test_what_starts_a_script_of_swifts_is_read_too(tmp_path, launcher, variables, expected):
    files = {"fsdp": tmp_path / "fsdp.json", "zero": tmp_path / "zero.yaml"}
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    files["fsdp"].write_text(json.dumps({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp}))
    files["zero"].write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
        "num_machines: 2\nnum_processes: 8\nmain_process_ip: 10.0.0.1\n"
    )
    text = f"{launcher.format_map(files)} \\\n    --model m --dataset d.jsonl"
    command, notes, missing = swift.translate(text)
    assert not missing
    assert expected.items() <= options(command).items()
    told = [note.partition(" ")[0] for note in notes if note.endswith("put it before the command")]
    assert sorted(told) == sorted(variables)


def test_what_a_launcher_is_told_and_nothing_here_does_is_named():
    for launcher, told in (
        ("deepspeed --hostfile=hosts", "--hostfile hosts: "),
        ("accelerate launch --config_file x", ""),
        ("accelerate launch", "accelerate launch without --num_processes: "),
        ("deepspeed", "deepspeed without --num_gpus: "),
        ("deepspeed --include a:0@b:1", "--include a:0@b:1: "),
    ):
        *_, (reason,) = swift.translate(f"{launcher} swift/cli/sft.py --model m --dataset d.jsonl")
        assert reason.startswith(told or "--config_file x: it cannot be read")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}, {"--stage": "3"}),
        ({"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}, {"--stage": "2"}),
        ({"fsdp": "shard_grad_op offload"}, {"--stage": "2", "--offload": "all"}),
        (
            {"fsdp": "full_shard", "fsdp_config": {"activation_cpu_offload": True, "activation_checkpointing": True}},
            {"--stage": "3", "--activation-offloading": "yes", "--gradient-checkpointing": "yes"},
        ),
    ],
)
def test_a_file_of_fsdp_is_a_stage(tmp_path, config, expected):
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(config))
    command, _, missing = swift.translate(f"swift sft --model m --dataset d.jsonl --fsdp {file}")
    assert not missing
    assert expected.items() <= options(command).items()
    assert options(swift.translate("swift sft --model m --dataset d.jsonl --fsdp fsdp2")[0])["--stage"] == "3"


def test_what_asks_for_nothing_else_is_left_out():
    said = "swift sft --model m --dataset d.jsonl --save_total_limit -1 --add_non_thinking_prefix true"
    command, _, missing = swift.translate(f"{said} --bnb_4bit_quant_storage bfloat16 --report_to swanlab")
    assert not missing
    assert "--save-total-limit" not in command
    assert "--report-to swanlab" in command


def test_variables_may_have_a_default():
    text = (
        'MODEL="${MODEL:-org/m}"\nRATE=\nswift sft --model $MODEL --dataset ${DATA:-d.jsonl} --learning_rate ${LR-1e-4}'
    )
    command, _, missing = swift.translate(text)
    assert not missing
    found = options(command)
    assert (found["--model"], found["--dataset"], found["--learning-rate"]) == ("MS::org/m", "d.jsonl", "1e-4")


@pytest.mark.parametrize(
    ("above", "rate", "meant"),
    [
        ("R=", "${R:-1e-5}", "1e-5"),  # nothing, too
        ("B=3e-5", "${A:-$B}", "3e-5"),
        ("B=3e-5", '"${A:-${B}}"', "3e-5"),
        ("", "${A:-${B:-1e-5}}", "1e-5"),
        (": ${R:=1e-5}", "$R", "1e-5"),
    ],
)
def test_a_default_may_hold_a_variable_and_stands_for_an_empty_one(above, rate, meant):
    command, *_ = swift.translate(f"{above}\nswift sft --model m --dataset d.jsonl --learning_rate {rate}")
    assert options(command)["--learning-rate"] == meant


@pytest.mark.parametrize("words", ["--model $1 --dataset d", '--model m --dataset d "$@"', '"${ARGS[@]}"'])
def test_what_a_script_is_called_with_is_not_taken_for_a_value(words):
    with pytest.raises(ConfigError, match=r"the script does not define \$"):
        swift.translate(f"swift sft {words}")


@pytest.mark.parametrize("written", ["'costs $5 or ${X:-y}'", r'"costs \$5 or \${X:-y}"', r"costs\ \$5\ or\ \${X:-y}"])
def test_a_dollar_in_single_quotes_or_behind_a_backslash_is_one(written):
    command, *_ = swift.translate(f"swift sft --model m --dataset d.jsonl --system {written}")
    assert options(command)["--system"] == "'costs $5 or ${X:-y}'"


def test_an_export_of_encoded_rows_is_data_encode() -> None:
    """What is not about rows is left out, and said."""
    said = "swift export --model m --dataset a b --to_cached_dataset true --torch_dtype bfloat16 --output_dir out"
    command, notes, missing = swift.translate(f"NPROC_PER_NODE=2 {said} --split_dataset_ratio 0.1 --dataset_num_proc 4")
    assert command.split("\n")[0].split() == ["shardproof", "data", "encode", "\\"]
    assert shlex.split(command.replace("\\\n", " "))[3:] == (
        "--model m --dataset a b --output-dir out --val-split 0.1 --bad-rows skip".split()
    )
    assert not missing
    assert any(note.startswith("--precision bf16 is left out") for note in notes)
    assert any(note.startswith("--nproc 2 is left out") for note in notes)
    for mode, kind in (("rlhf", "dpo"), ("kto", "kto")):
        words = swift.translate(f"{said} --template_mode {mode}")[0].replace("\\\n", " ").split()
        assert words[:4] == ["shardproof", "data", "encode", "rlhf"]
        assert words[words.index("--rlhf-type") + 1] == kind
    with pytest.raises(ConfigError, match="rows can be encoded for train, rlhf, kto"):
        swift.translate(f"{said} --template_mode grpo")


def test_a_run_on_encoded_rows_needs_no_dataset() -> None:
    cached = "swift sft --model m --cached_dataset out/train --cached_val_dataset out/val --max_length 64"
    command, _, missing = swift.translate(cached)
    assert not missing
    assert "--cached-dataset out/train" in command
    assert "--cached-val-dataset out/val" in command
    assert "--eval-steps 500" in command


def test_pairs_of_a_reranker_are_drawn_as_there() -> None:
    """One positive and seven negatives, unless variables say otherwise; of other tasks these do nothing."""
    said = "swift sft --model m --dataset a --max_length 64"
    command, _, missing = swift.translate(f"MAX_NEGATIVE_SAMPLES=3 {said} --task_type generative_reranker")
    assert not missing
    assert (options(command)["--max-positives"], options(command)["--max-negatives"]) == ("1", "3")
    assert options(swift.translate(f"{said} --task_type reranker")[0])["--max-negatives"] == "7"
    command, notes, missing = swift.translate(f"MAX_NEGATIVE_SAMPLES=3 {said}")
    assert (missing, "--max-negatives" in command) == ([], False)
    assert "--max-negatives 3 is left out: it would have no effect" in notes


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("--loss_type real", "--loss-type real: grpo has no such loss"),
        ("--chord_sft_dataset a/b --chord_mu_peak 0.1 --chord_mu_valley 0.9", "--chord-mu-valley 0.9 is above"),
    ],
)
def test_a_loss_that_nobody_has_here_is_told(capsys: pytest.CaptureFixture[str], asked: str, text: str) -> None:
    swift.run(["swift", "rlhf", "--rlhf_type", "grpo", "--model", "Q/q", "--dataset", "a/b", *asked.split()])
    assert f"this command would be refused: {text}" in "".join(capsys.readouterr())


SEEING = (
    *("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen2.5-VL-7B-Instruct", "google/gemma-4-E4B-it", "ZhipuAI/GLM-4.5V"),
    *("moonshotai/Kimi-K2.5", "LLM-Research/Llama-4-Scout-17B-16E", "mistralai/Ministral-3-8B-Instruct-2512"),
    *("OpenBMB/MiniCPM-V-4_5", "AIDC-AI/Ovis2.5-2B", "deepseek-ai/DeepSeek-OCR", "Qwen/Qwen3-ASR-0.6B"),
)
READING = (
    "Qwen/Qwen3-8B",
    "ZhipuAI/GLM-4.5",
    "LLM-Research/Meta-Llama-3.1-8B",
    "google/embeddinggemma-300m",
    "a/matts",
)


@pytest.mark.parametrize(("name", "sees"), [*((name, True) for name in SEEING), *((name, False) for name in READING)])
def test_towers_are_frozen_of_models_that_have_some(name: str, sees: bool) -> None:
    command, *_ = swift.translate(f"swift sft --model {name} --dataset d")
    assert ("--freeze vision audio aligner" in command) == sees


def test_a_folder_says_whether_its_model_has_towers(tmp_path: Path) -> None:
    for config, sees in (({"vision_config": {}, "text_config": {}}, True), ({"hidden_size": 8}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        command, *_ = swift.translate(f"swift sft --model {tmp_path} --dataset d")
        assert ("--freeze vision audio aligner" in command) == sees


@pytest.mark.parametrize("task", ["seq_cls --num_labels 3", "reranker", "generative_reranker", "embedding"])
def test_packing_of_what_is_judged_by_one_token_is_to_leave_out_padding(task: str) -> None:
    command, notes, missing = swift.translate(f"swift sft --model m --dataset d --task_type {task} --packing true")
    assert not missing
    assert ("--padding-free true" in command, "--packing" in command) == (True, False)
    assert any(note.startswith("--packing is --padding-free here") for note in notes)


def test_an_assignment_counts_for_the_next_one_in_front_of_a_command() -> None:
    """And not yet for its words, as in a shell."""
    said = "swift sft --model m --dataset d --output_dir ${n:-none}"
    command, *_ = swift.translate(f"n=2 NPROC_PER_NODE=$n {said}")
    assert (options(command)["--nproc"], options(command)["--output-dir"]) == ("2", "none")


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("--model OpenGVLab/InternVL3-8B", "it supports text only, and MS::OpenGVLab/InternVL3-8B takes files"),
        (
            "--adapters out/x",
            "it takes full models only; run 'shardproof export out/x out/x-merged' and use the result",
        ),
        ("--model Qwen/Qwen3-8B", None),
    ],
)
def test_what_vllm_cannot_be_asked_is_said_before(theirs: str, told: str | None) -> None:
    *_, missing = swift.translate(f"swift infer {theirs} --infer_backend vllm")
    assert len(missing) == (told is not None)
    assert told is None or told in missing[0]


def test_experts_are_balanced_by_checkpoints_that_have_a_gradient() -> None:
    said = "swift sft --model m --dataset d --deepspeed zero2 --router_aux_loss_coef"
    for weight, kind in (("1e-3", "no"), ("0", "yes")):
        assert options(swift.translate(f"{said} {weight}")[0])["--checkpointing-reentrant"] == kind


def test_a_vllm_of_its_own_does_not_sleep() -> None:
    said = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true --sleep_level 1"
    command, notes, _ = swift.translate(f"{said} --vllm_mode server --vllm_server_host 127.0.0.1")
    assert "--vllm-sleep" not in command
    assert "--vllm-sleep yes is left out: it would have no effect" in notes
    assert "--vllm-sleep yes" in swift.translate(f"{said} --vllm_mode colocate")[0]


def test_checkpoints_of_no_known_time_are_told() -> None:
    said = "swift sft --model m --dataset d --streaming true --max_steps 9 --save_strategy epoch"
    *_, (reason,) = swift.translate(said)
    assert "--save-strategy epoch: the length of a pass over a stream is not known" in reason


def test_how_long_answers_are_and_how_they_are_drawn_is_told() -> None:
    _, notes, _ = swift.translate("swift infer --model m")
    assert [note.partition(" unless ")[0] for note in notes if " unless --" in note and "MS::" not in note] == [
        "an answer has at most 128 tokens",
        "decoding is greedy",
    ]
    _, notes, _ = swift.translate("swift infer --model m --max_new_tokens 9 --temperature 0.7")
    assert not any("128" in note or "likeliest" in note for note in notes)
