"""Commands and options of other trainers, with their equivalents here. They are named in error messages but not
accepted: options that ms-swift itself has are in from_swift/options.py."""

from __future__ import annotations

# Options of Accelerate, DeepSpeed, LLaMA-Factory, TRL, transformers and the like: our option, and the value meant.
HERE: dict[str, tuple[str, str]] = {
    "lr": ("learning_rate", ""),
    "num_epochs": ("epochs", ""),
    "n_epochs": ("epochs", ""),
    "max_train_steps": ("max_steps", ""),
    "num_steps": ("max_steps", ""),
    "model_name_or_path": ("model", ""),
    "model_path": ("model", ""),
    "dataset_name": ("dataset", ""),
    "dataset_path": ("dataset", ""),
    "data_path": ("dataset", ""),
    "train_file": ("dataset", ""),
    "train_dataset": ("dataset", ""),
    "validation_file": ("val_dataset", ""),
    "eval_file": ("val_dataset", ""),
    "val_size": ("val_split", ""),
    "train_batch_size": ("global_batch_size", ""),
    "train_micro_batch_size_per_gpu": ("per_device_batch_size", ""),
    "micro_batch_size": ("per_device_batch_size", ""),
    "bs": ("per_device_batch_size", ""),
    "grad_accum": ("gradient_accumulation_steps", ""),
    "accumulation_steps": ("gradient_accumulation_steps", ""),
    "gradient_clipping": ("max_grad_norm", ""),
    "clip_grad_norm": ("max_grad_norm", ""),
    "max_seq_length": ("max_length", ""),
    "max_seq_len": ("max_length", ""),
    "seq_length": ("max_length", ""),
    "cutoff_len": ("max_length", ""),
    "zero_stage": ("stage", ""),
    "num_processes": ("nproc", ""),
    "nproc_per_node": ("nproc", ""),
    "num_gpus": ("nproc", ""),
    "num_machines": ("nnodes", ""),
    "mixed_precision": ("precision", ""),
    "finetuning_type": ("tuner", ""),
    "use_peft": ("tuner", "lora"),
    "use_lora": ("tuner", "lora"),
    "lora": ("tuner", "lora"),
    "lora_r": ("lora_rank", ""),
    "lora_target": ("target_modules", ""),
    "lora_target_modules": ("target_modules", ""),
    "lora_modules_to_save": ("modules_to_save", ""),
    "load_in_4bit": ("quantize", "nf4"),
    "use_4bit": ("quantize", "nf4"),
    "attn_implementation": ("attn", ""),
    "flash_attn": ("attn", "flash_attention_2"),
    "system_prompt": ("system", ""),
    "output": ("output_dir", ""),
    "save_path": ("output_dir", ""),
    "save_every": ("save_steps", ""),
    "eval_every": ("eval_steps", ""),
    "log_every": ("logging_steps", ""),
    "assistant_only_loss": ("loss", "answer"),
    "train_on_inputs": ("loss", "all"),
    "cpu_offload": ("offload", "all"),
    "sequence_parallel_degree": ("sequence_parallel", ""),
    "context_parallel_size": ("sequence_parallel", ""),
    "pref_beta": ("beta", ""),
    "pref_loss": ("loss_type", ""),
    "resume_from": ("resume", ""),
}
# Options of others without an exact equivalent.
INSTEAD = {
    **dict.fromkeys(("load_in_8bit", "use_8bit"), "Frozen weights can be packed in four bits: --quantize nf4."),
    **dict.fromkeys(("do_train", "train"), "Leave it out: 'shardproof sft' and 'shardproof rlhf' train."),
    **dict.fromkeys(("do_eval", "do_predict"), "The rows of --val-dataset or --val-split are evaluated."),
    "dataset_dir": "--dataset takes the path of a file.",
    "dataset_info": "--dataset takes the path of a file, and --columns says what its columns mean.",
}

_SERVED = "'shardproof export RUN FOLDER', then 'vllm serve FOLDER' or 'transformers serve FOLDER', in OpenAI's form"
_RLHF = ("dpo", "kto", "grpo", "rloo", "ppo", "gkd", "orpo", "cpo")
_OF_RLHF = {kind: f"'shardproof rlhf --rlhf-type {kind}'" for kind in (*_RLHF, "rm")}
# LLaMA-Factory's --stage is the kind of training.
STAGES = {"sft": "'shardproof sft'", "pt": "'shardproof sft --plain --loss all'", **_OF_RLHF}
# Commands of ms-swift, LLaMA-Factory and TRL.
COMMANDS = {
    **dict.fromkeys(
        ("llamafactory-cli", "trl", "accelerate", "deepspeed", "axolotl", "tune"),
        "'shardproof sft' and 'shardproof rlhf' train; their options are in --help",
    ),
    "pt": "'shardproof sft --plain --loss all' continues pre-training",
    "train": "'shardproof sft', or 'shardproof rlhf --rlhf-type dpo' and the like",
    **{kind: _OF_RLHF[kind] for kind in _RLHF},
    "reward": _OF_RLHF["rm"],
    "merge-lora": "'shardproof export RUN FOLDER' merges adapters into their model",
    **dict.fromkeys(("deploy", "serve", "api", "vllm-serve"), _SERVED),
    "rollout": "'vllm serve MODEL', then 'shardproof rlhf --use-vllm --vllm-server URL'",
    **dict.fromkeys(("chat", "cli"), "'shardproof infer RUN' chats on the terminal"),
    **dict.fromkeys(("app", "webchat"), f"'shardproof infer RUN' chats on the terminal; for a web page, {_SERVED}"),
    **dict.fromkeys(("web-ui", "webui"), "options go in a file; 'shardproof watch RUN' shows a run in the browser"),
    "eval": "'shardproof infer RUN --dataset test.jsonl' writes the answers next to the references; for benchmarks,"
    " 'shardproof export RUN FOLDER', then 'lm_eval --model hf --model_args pretrained=FOLDER --tasks NAME'",
    "sample": "'shardproof infer RUN --dataset prompts.jsonl --temperature 1' writes an answer for each row",
    "megatron": "'shardproof sft' shards the model with ZeRO, and rows with --sequence-parallel",
    "launch": "'shardproof sft --nproc N' starts the processes itself; torchrun and srun work too",
}
