"""ms-swift options without an equivalent here: those without effect, those refused, and what to use instead."""

from collections.abc import Sequence

from shardproof.errors import ConfigError


def is_on(values: Sequence[str]) -> bool:
    """Whether a switch of ms-swift is on, as it also is without a value."""
    return not values or values[0].lower() in ("true", "yes", "1")


def missing(said: str, instead: str = "") -> ConfigError:
    """The error for an option without an equivalent. `instead`: what to do, or what is available."""
    return ConfigError(f"{said}: an ms-swift option without an equivalent here{f'; {instead}' if instead else ''}.")


# Options without effect here: the work is done anyway, or in another way.
WITHOUT_EFFECT = {
    "tuner_backend": "adapters are PEFT's",
    "template_backend": "templates are the tokenizer's",
    "use_hf": "names refer to the Hugging Face hub, or with MS:: in front to ModelScope's",
    "check_model": "files are read in place",
    "add_version": "a new folder is created unless --output-dir is given",
    "dataset_num_proc": "rows are encoded on all cores",
    "load_from_cache_file": "rows are encoded in each run, on all cores, unless --cached-dataset names them",
    "lazy_tokenize": "rows are encoded before training, on all cores",
    "dataset_shuffle": "rows are shuffled in each epoch",
    "dataloader_num_workers": "rows are encoded before training",
    "dataloader_pin_memory": "rows are encoded before training",
    "dataloader_persistent_workers": "rows are encoded before training",
    "dataloader_prefetch_factor": "rows are encoded before training",
    "remove_unused_columns": "unneeded columns are ignored",
    "logging_first_step": "the first step is always logged",
    "average_tokens_across_devices": "every token of a step always weighs the same, on all processes",
    "ddp_find_unused_parameters": "parameters may always be unused",
    "ddp_broadcast_buffers": "ranks always start equal",
    "ddp_timeout": "ranks that wait for each other forever are detected within seconds",
    "ddp_backend": "chosen by the device",
    "ds3_gather_for_generation": "generation keeps parameters gathered if they fit",
    "safe_serialization": "weights are always safetensors",
    "create_checkpoint_symlink": "--resume auto finds the newest checkpoint",
    "ignore_args_error": "options are checked first",
    "model_type": "it is read from the model's config",
    "model_author": "it fills in rows of swift/self-cognition",
    "model_name": "it fills in rows of swift/self-cognition",
    "use_liger_kernel": "for sft only; kernels do not change results",
    "bnb_4bit_quant_storage": "packed weights are sharded in any storage dtype",
    "bnb_4bit_compute_dtype": "packed weights compute in --precision",
    "use_logits_to_keep": "unused logits do not change results",
    "vit_gradient_checkpointing": "--gradient-checkpointing covers towers, too, and does not change results",
    "log_rollout_offpolicy_metrics": "vLLM's probabilities are always compared with the model's",
    "log_entropy": "it is logged if the trainer computes it",
    **dict.fromkeys(
        ("offload_model", "offload_optimizer", "move_model_batches"),
        "it makes room for vLLM in the training processes; --vllm-gpu-memory-utilization sets vLLM's share",
    ),
    "vllm_enable_lora": "vLLM gets weights with the adapters merged",
    **dict.fromkeys(
        (
            *("vllm_enforce_eager", "vllm_enable_prefix_caching", "vllm_disable_custom_all_reduce"),
            *("vllm_speculative_config", "vllm_limit_mm_per_prompt"),
        ),
        "vLLM decides; it affects only its speed and memory",
    ),
    "galore_optim_per_parameter": "the optimizer steps when all gradients are ready",
    "template": "the tokenizer's own template is used; --chat-template replaces it",
    "val_dataset_shuffle": "an evaluation gives the same numbers in any order",
    "padding_side": "padding does not change results",
    "logging_dir": "logs are in the output folder",
    "run_name": "the output folder names the run",
    "greater_is_better": "lower is better for a loss, higher for everything else",
    "save_on_each_node": "all machines share one checkpoint",
    "hub_strategy": "nothing is pushed to a hub",
    "hub_private_repo": "nothing is pushed to a hub",
    "packing_num_proc": "rows are packed by one process",
    "acc_strategy": "only the metrics that --metrics names are computed",
    "logging_nan_inf_filter": "a loss of NaN or inf is shown unchanged, and three such steps in a row end the run",
    "local_rank": "the launcher sets it",
    "save_safetensors": "weights are always safetensors",
    "num_sample_generations": "answers are written to completions.jsonl",
    "local_rollout_forward_batch_size": "the work is done micro-batch by micro-batch",
    **dict.fromkeys(
        ("ref_model_type", "reward_model_type", "teacher_model_type"), "it is read from the model's config"
    ),
    **dict.fromkeys(
        ("disable_tqdm", "log_level", "skip_memory_metrics", "include_num_input_tokens_seen"),
        "each step prints one line",
    ),
    **dict.fromkeys(
        ("eval_accumulation_steps", "eval_do_concat_batches"), "an evaluation adds up sums and keeps no outputs"
    ),
}

# Options without an equivalent here, each with the values that ask for nothing.
MISSING = {
    **dict.fromkeys(
        (
            *("packing", "streaming", "galore_quantization", "galore_with_embedding"),
            *("predict_with_generate", "push_to_hub", "use_ray", "use_vllm", "use_flash_ckpt"),
            *("enable_dft_loss", "enable_channel_loss", "eval_use_evalscope", "resume_only_model"),
            "sync_ref_model",
            *("async_generate", "use_gym_env"),
            *("load_args", "load_data_args", "ignore_data_skip", "merge_lora", "use_cpu"),
            *("auto_find_batch_size", "whiten_rewards", "stream"),
        ),
        ("false",),
    ),
    "response_prefix": ("none", ""),
    "norm_bbox": (),  # 'none' asks for pixels
    "galore_proj_type": ("std",),
    **dict.fromkeys(("train_dataloader_shuffle", "bnb_4bit_use_double_quant", "add_non_thinking_prefix"), ("true",)),
    **dict.fromkeys(("sequence_parallel_size", "deepspeed_autotp_size", "num_beams", "num_mini_batches"), ("1",)),
    **dict.fromkeys(("freeze_parameters_ratio", "label_smoothing_factor", "eval_delay"), ("0", "0.0")),
    **dict.fromkeys(
        (
            *("quant_method", "bnb_4bit_quant_type", "galore_target_modules"),
            *("zero_hpz_partition_size", "rope_scaling", "max_model_len", "device_map", "max_memory"),
            "custom_dataset_info",
            *("new_special_tokens", "task_type", "num_labels"),
            *(
                "optim_args",
                "model_kwargs",
            ),
            *("hub_token", "hub_model_id"),
            *("per_device_eval_batch_size", "data_seed", "max_epochs", "multi_turn_scheduler"),
            *("use_chat_template", "max_turns", "gym_env", "label_names"),
            *("problem_type", "experts_impl"),
            *("generation_batch_size", "teacher_tag_key"),
            *("shuffle_buffer_size", "download_mode", "local_repo_path", "init_strategy"),
            *("temperature", "top_p", "top_k", "repetition_penalty"),
            *("max_new_tokens", "logprobs", "top_logprobs", "hqq_axis"),
            *("ray_exp_name", "device_groups", "lora_bias", "lora_dtype", "max_shard_size", "packing_length"),
            *("eval_dataset_args", "eval_limit", "eval_generation_config", "fsdp_config", "tf32", "logging_strategy"),
            *("torch_empty_cache_steps", "ref_model_revision", "reward_model_revision", "teacher_model_revision"),
            *("teacher_adapters", "missing_eos_penalty", "completion_length_limit_scope"),
            *("rollout_importance_sampling_mode", "rollout_importance_sampling_threshold", "infer_backend"),
            *("reward_adapters", "reward_model_plugin", "eval_dataset", "loss_scale"),
        ),
        ("none",),
    ),
}

# Values that ask for what is done here anyway.
HARMLESS = {
    "task_type": ("causal_lm",),
    "quant_method": ("bnb",),
    "bnb_4bit_quant_type": ("nf4",),
    "loss_scale": ("last_round",),  # for rlhf, whose trainers compare last answers
    "model_kwargs": ("{}",),
    "experts_impl": ("grouped_mm",),
    "use_chat_template": ("true",),
    "download_mode": ("reuse_dataset_if_exists",),
    "lora_dtype": ("float32",),
    "max_shard_size": ("5gb",),
    "logging_strategy": ("steps",),
    "logprobs": ("false",),
    "completion_length_limit_scope": ("per_round",),
    "infer_backend": ("pt", "transformers"),
    "per_device_eval_batch_size": None,  # any: evaluation gives the same loss
}

# What to do instead of an option that does not exist here.
INSTEAD = {
    "norm_bbox": "boxes are written in thousandths or in pixels, as each model family expects",
    "packing": "only 'shardproof sft' packs rows; --padding-free leaves padding out in rlhf, too",
    "train_dataloader_shuffle": "rows are always shuffled in each epoch (except with --streaming --shuffle-buffer-size"
    " 0)",
    **dict.fromkeys(
        ("multi_turn_scheduler", "max_turns"),
        "turn the scheduler into a class that grpo's answers call (--environments FILE.py:CLASS) or a function "
        "(--tools); --max-turns N then becomes --max-tool-calling-iterations N-1 (docs/acting.md has an example)",
    ),
    **dict.fromkeys(
        ("use_gym_env", "gym_env"),
        "--environments FILE.py:CLASS lets answers of grpo act in a world that judges them (docs/acting.md)",
    ),
    "reward_model_plugin": "for a generative judge write a function, --reward-funcs FILE.py:FUNCTION, which may be"
    " async and query a server with the judge ('vllm serve MODEL')",
    "data_seed": "--seed also sets the order of rows",
    "freeze_parameters_ratio": r"--freeze-parameters takes regular expressions for names, such as 'layers\.[0-9]\.'",
    "enable_channel_loss": "--val-dataset FILE FILE reports the loss of each file; use one file per kind of row",
    "response_prefix": "'shardproof infer' has it; in training the template writes the start of every answer:"
    " --chat-template",
    "loss_scale": "'shardproof sft' takes last_round, all and default, each with react, hermes, qwen, agentflan,"
    " alpha_umi, ignore_think_prefix and (except all) ignore_empty_think after a +; for your own patterns use"
    " --token-weights FILE.json",
    "generation_batch_size": "--steps-per-generation sets the number of micro-batches to generate answers for at once",
    "lora_dtype": "adapters are fp32 and compute in --precision",
    "quant_method": "bitsandbytes packs weights, with --quantize nf4 or fp4",
    "bnb_4bit_quant_type": "--quantize fp4",
    "bnb_4bit_use_double_quant": "scales are always packed too",
    **dict.fromkeys(
        ("reward_adapters", "teacher_adapters"),
        "merge them with 'shardproof export RUN FOLDER', and give that folder as the model",
    ),
    **dict.fromkeys(
        ("ref_model_revision", "reward_model_revision", "teacher_model_revision"),
        "fetch it with 'hf download MODEL --revision X --local-dir FOLDER', and give that folder as the model",
    ),
    **dict.fromkeys(
        ("load_args", "load_data_args"), "--config RUN/config.yaml takes the options of another run, including its data"
    ),
    **dict.fromkeys(("merge_lora", "max_shard_size"), "'shardproof export RUN FOLDER' does that with a run"),
    **dict.fromkeys(
        (
            *("max_new_tokens", "num_beams", "stream", "logprobs", "top_logprobs", "infer_backend"),
            *("temperature", "top_p", "top_k", "repetition_penalty"),
        ),
        "'shardproof infer' generates, as does rlhf with --max-completion-length",
    ),
    "ray_exp_name": "--launcher ray starts the processes on a cluster",
    **dict.fromkeys(
        ("use_ray", "device_groups"),
        "--launcher ray --nproc N starts N processes on a cluster, and in rlhf each of them holds all models",
    ),
    "fsdp_config": "--stage 0 to 3 sets what is sharded",
    "add_non_thinking_prefix": "the model's own template decides about empty thoughts; --loss"
    " answer+ignore_empty_think does not train on them",
    "teacher_tag_key": "only one teacher is supported: --teacher-model-server takes its address",
    "download_mode": "'hf cache rm' removes a dataset from the cache, and the next run fetches it again",
    "ignore_data_skip": "run 'shardproof export CHECKPOINT FOLDER' and start anew from its weights with --model FOLDER",
    "resume_only_model": "run 'shardproof export CHECKPOINT FOLDER' and start anew from its weights with --model"
    " FOLDER",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"),
        "'shardproof export runs/RUN FOLDER --push-to-hub OWNER/NAME' does it after the run",
    ),
    "hub_token": "set HF_TOKEN in the environment, which does not show up in process lists",
    "packing_length": "--max-length is the length of packed rows",
    "label_smoothing_factor": "only 'shardproof sft' smooths tokens; dpo's --label-smoothing is about pairs",
    "tf32": "torch.set_float32_matmul_precision('high') in a file of --external-plugins, or --precision bf16",
    "use_cpu": "CUDA_VISIBLE_DEVICES= before the command hides the GPUs",
    "auto_find_batch_size": "'shardproof plan' says what fits before anything is loaded",
    "logging_strategy": "--logging-steps sets the interval",
    "max_epochs": "--epochs sets the number",
    "sync_ref_model": "--sync-ref-steps N does it every N steps",
    "enable_dft_loss": "use --loss-type dft with 'shardproof sft'",
    **dict.fromkeys(
        ("new_special_tokens", "rope_scaling", "max_model_len"),
        "make the change with 'shardproof sft', and start rlhf from the saved model",
    ),
    **dict.fromkeys(("task_type", "num_labels", "problem_type"), "'shardproof sft --task seq_cls' trains on labels"),
    "streaming": "rlhf keeps the texts of all rows in memory; sft has --streaming",
}
