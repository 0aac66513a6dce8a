"""Options of ms-swift that have no equivalent here: which decide nothing, which are refused, and what to do instead."""

# What decides nothing here: the work is done anyway, or in another way.
WITHOUT_EFFECT = {
    "tuner_backend": "adapters are PEFT's",
    "template_backend": "templates are the tokenizer's",
    "use_hf": "folders are local, or of the Hugging Face hub",
    "check_model": "files are read where they lie",
    "add_version": "a new folder is made unless --output-dir is given",
    "dataset_num_proc": "rows are encoded on all cores",
    "load_from_cache_file": "rows are encoded in each run, on all cores",
    "lazy_tokenize": "rows are encoded before, on all cores",
    "dataset_shuffle": "rows are shuffled in each epoch",
    "dataloader_num_workers": "rows are encoded before",
    "dataloader_pin_memory": "rows are encoded before",
    "dataloader_persistent_workers": "rows are encoded before",
    "dataloader_prefetch_factor": "rows are encoded before",
    "remove_unused_columns": "what is not asked for is not used",
    "logging_first_step": "the first step is always logged",
    "average_tokens_across_devices": "every token of a step weighs the same on all processes, always",
    "ddp_find_unused_parameters": "parameters may be unused, always",
    "ddp_broadcast_buffers": "ranks start equal, always",
    "ddp_timeout": "ranks that wait for each other for good are found within seconds",
    "ddp_backend": "chosen by the device",
    "ds3_gather_for_generation": "generation keeps parameters gathered where they fit",
    "safe_serialization": "weights are safetensors, always",
    "create_checkpoint_symlink": "--resume auto finds the newest checkpoint",
    "ignore_args_error": "options are checked first",
    "model_type": "the model's own config says it",
    "model_author": "it fills in rows of swift/self-cognition",
    "model_name": "it fills in rows of swift/self-cognition",
    "padding_free": "padding changes no number; --packing of sft fills rows with other rows",
    "use_liger_kernel": "of sft; kernels change no number",
    "bnb_4bit_compute_dtype": "packed weights are computed with in --precision",
    "use_logits_to_keep": "logits that are not used change no number",
    "log_entropy": "it is logged where the trainer computes it",
    **dict.fromkeys(
        ("sleep_level", "offload_model", "offload_optimizer", "move_model_batches"),
        "it makes room for a vLLM in the processes that train",
    ),
    "template": "the tokenizer's own template is used; --chat-template gives another",
}

# What Swift's users ask for and has no equivalent here, by the option's value that asks for nothing.
MISSING = {
    **dict.fromkeys(
        (
            *("packing", "streaming", "use_galore"),
            *("predict_with_generate", "push_to_hub", "use_ray", "use_vllm", "use_flash_ckpt"),
            *("enable_dft_loss", "enable_channel_loss", "eval_use_evalscope", "resume_only_model"),
            *("dynamic_sample", "offload_teacher_model", "sync_ref_model", "dataloader_drop_last", "kl_in_reward"),
            *("async_generate", "use_gym_env", "vit_gradient_checkpointing"),
        ),
        ("false",),
    ),
    **dict.fromkeys(("train_dataloader_shuffle", "bnb_4bit_use_double_quant"), ("true",)),
    **dict.fromkeys(("sequence_parallel_size", "deepspeed_autotp_size"), ("1",)),
    **dict.fromkeys(("lisa_activated_layers", "freeze_parameters_ratio"), ("0", "0.0")),
    **dict.fromkeys(
        (
            *("quant_method", "bnb_4bit_quant_type", "target_parameters"),
            "init_weights",
            *("fsdp", "zero_hpz_partition_size", "rope_scaling", "max_model_len", "device_map", "max_memory"),
            *("lorap_lr_ratio", "model_author", "model_name", "custom_dataset_info"),
            *("interleave_prob", "cached_dataset", "new_special_tokens", "task_type", "num_labels", "model_revision"),
            *(
                "optim_args",
                "save_strategy",
                "eval_strategy",
                "adapters",
                "model_kwargs",
            ),
            *("agent_template", "hub_token", "hub_model_id"),
            *("per_device_eval_batch_size", "data_seed", "max_epochs", "multi_turn_scheduler", "vllm_mode"),
            *("response_prefix", "use_chat_template", "stop_words", "max_turns", "label_names"),
            *("problem_type", "router_aux_loss_coef", "experts_impl", "advantage_estimator"),
            *("sft_alpha", "generation_batch_size", "chord_sft_dataset"),
            *("ref_adapters", "reward_adapters", "teacher_deepspeed", "reward_model_plugin", "eval_dataset"),
        ),
        ("none",),
    ),
}

# Values that say what is done here anyway.
HARMLESS = {
    "task_type": ("causal_lm",),
    "quant_method": ("bnb",),
    "bnb_4bit_quant_type": ("nf4",),
    "loss_scale": ("last_round",),  # of rlhf, whose trainers compare last answers
    "save_strategy": ("steps", "no"),
    "eval_strategy": ("steps", "no"),
    "model_kwargs": ("{}",),
    "vllm_mode": ("server",),
    "advantage_estimator": ("grpo",),
    "use_chat_template": ("true",),
    "sft_alpha": ("0", "0.0"),
    "router_aux_loss_coef": ("0", "0.0"),
    "per_device_eval_batch_size": None,  # any: evaluation gives the same loss
}

# What to do instead of an option that is not here.
INSTEAD = {
    "packing": "only 'shardproof sft' packs rows; of pairs, --group-by-length saves padding, too",
    "vllm_mode": "leave out --use-vllm, and the sharded model itself generates, or start 'vllm serve', then --use-vllm "
    "--vllm-server URL",
    "dataloader_drop_last": "the last step of an epoch is filled up with rows of its beginning",
    "train_dataloader_shuffle": "rows are shuffled in each epoch, always",
    "agent_template": "tools are written by the tokenizer's own template, or by the one of --chat-template",
    "loss_scale": "--loss takes answer, last_round and all",
    "generation_batch_size": "--steps-per-generation says how many micro-batches answers are generated for at once",
    "save_strategy": "--save-steps writes checkpoints, and none are written without it",
    "eval_strategy": "--eval-steps evaluates, and without it the end of the run does",
    "lora_dtype": "adapters are fp32 and compute in --precision",
    "quant_method": "bitsandbytes packs, by --quantize nf4 or fp4",
    "bnb_4bit_quant_type": "--quantize fp4",
    "bnb_4bit_use_double_quant": "scales are packed, too, always",
    "adapters": "merge them into the model first: 'shardproof export' does with those of a run",
    **dict.fromkeys(("task_type", "num_labels", "problem_type"), "'shardproof sft --task seq_cls' learns labels"),
    "streaming": "lines stay in their files, but the tokens of all rows (of rlhf, the texts) are in memory",
}
