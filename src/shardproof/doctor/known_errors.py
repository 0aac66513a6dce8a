"""What is known of errors that people meet when they shard: from public threads, read as excerpts.

`why` ends in "(inferred)" where the threads do not say it. Versions move on: see a thread for its present state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One kind of failure.

    Args:
        name: of the failure.
        engines: where it is met.
        patterns: regular expressions, any of which tells it (case is ignored).
        means, why: what has happened, and what causes it.
        there: what people do about it in those engines; `here` what is different in shardproof.
        threads: public ones.
        cases: of the casebook, which run it.
    """

    name: str
    engines: str
    patterns: tuple[str, ...]
    means: str
    why: str
    there: str
    here: str
    threads: tuple[str, ...]
    cases: tuple[str, ...] = ()


KNOWN = (
    Known(
        "gradient reduced twice",
        "DeepSpeed ZeRO-1 and 2",
        (r"parameter \d+ has already been reduced", r"multiple gradient reduction is currently not supported"),
        "A parameter's gradient was computed twice in one backward pass.",
        "The hook on a gradient starts its reduction and expects to be called once. Reentrant checkpointing"
        " calls it for"
        " each use of a shared weight.",
        "use_reentrant=False, no checkpointing, or stage 3; which of them helps differs between threads.",
        "Contributions add up and are reduced when every use has given its part: nothing has to happen once.",
        ("deepspeedai/DeepSpeed#988", "OpenBMB/MiniCPM-V#423", "modelscope/ms-swift#3128", "xfactlab/orpo#9"),
        ("reentrant_checkpoint_of_shared_block",),
    ),
    Known(
        "parameter marked ready twice",
        "DDP",
        (r"marked as ready twice", r"expected to mark a variable ready only once"),
        "DDP counts each parameter's gradient once a step, and one came twice.",
        "Reentrant checkpointing runs backward passes inside backward, which clashes with the counting, the"
        " more so with"
        " find_unused_parameters=True.",
        "use_reentrant=False, find_unused_parameters=False, or static_graph=True.",
        "There is no counting. Both kinds of checkpointing give the numbers of one process.",
        ("modelscope/ms-swift#3171", "huggingface/trl#835", "huggingface/peft#313", "huggingface/accelerate#389"),
        ("grpo_with_reentrant_checkpointing",),
    ),
    Known(
        "unused parameters",
        "DDP",
        (
            r"expected to have finished reduction in the prior iteration",
            r"parameters that were not used in producing loss",
        ),
        "Some parameters got no gradient in the last step.",
        "DDP waits for the gradient of every parameter, and these were not in the graph of the loss.",
        "find_unused_parameters=True, after a look whether they ought to have been used: the flag hides"
        " wiring mistakes.",
        "What no rank uses has no gradient, and weight decay leaves it alone. `shardproof doctor` names"
        " what gets none.",
        ("huggingface/accelerate#2017", "modelscope/ms-swift#587", "huggingface/transformers#30633"),
        ("unused_parameters",),
    ),
    Known(
        "ranks wait for each other",
        "all, over NCCL",
        (
            r"watchdog caught collective operation timeout",
            r"workncc?l\(.*timeout",
            r"some nccl operations have failed or timed out",
            r"_allgather_base.*timeout",
            r"timed out waiting \d+ms for (recv|send) operation",
        ),
        "One rank waited for a collective that another one never started.",
        "Ranks took different paths: images on some ranks only, experts without tokens, rows or generated"
        " texts of different"
        " numbers, saving or evaluating under `if rank == 0`.",
        "Make every rank call every module equally often (dummy inputs times zero), synced_gpus=True for"
        " generation, leaf"
        " modules for experts, call save on all ranks.",
        "Ranks may take different paths, and a rank that never comes ends all within 10 s with a message that says who"
        " waits for what, and where.",
        (
            "deepspeedai/DeepSpeed#7170",
            "huggingface/transformers#37186",
            "deepspeedai/DeepSpeed#7461",
            "NVIDIA/nccl#1260",
        ),
        ("images_on_some_ranks", "experts_without_tokens", "generate_to_different_lengths"),
    ),
    Known(
        "another rank is gone",
        "all, over gloo or NCCL",
        (
            r"connection closed by peer",
            r"connection reset by peer",
            r"remote process exited or there was a network error",
            r"ncclremoteerror",
        ),
        "This rank lost its connection to another one, which has ended before.",
        "The first error is that of the other rank (out of memory, an exception, killed); this text is only its echo.",
        "Look for the rank that ended first, in its own output and in the kernel's log.",
        "The rank that ended first is told, once, and the others name its exception.",
        ("NVIDIA/nccl#1260", "NVIDIA/nccl#1324"),
    ),
    Known(
        "gradient of size zero",
        "DeepSpeed ZeRO-3",
        (r"returned an invalid gradient at index \d+ - got \[0\]",),
        "A parameter was read outside of its module's forward, as in `sum(p.sum() for p in adapter.parameters()) * 0`.",
        "Autograd noted the whole shape, and the gradient arrives for a parameter of size zero (inferred).",
        "Take the dummy loss out under ZeRO-3.",
        "A parameter keeps its shape, and reading it anywhere gathers it through autograd.",
        ("modelscope/ms-swift#3262", "deepspeedai/DeepSpeed#7078", "huggingface/transformers#36387"),
        ("dummy_loss_over_unused_adapter",),
    ),
    Known(
        "weight must be 2-D",
        "DeepSpeed ZeRO-3, FSDP",
        (r"'?weight'? must be 2-?d", r"mat2 must be a matrix, got 1-d tensor"),
        "A forward ran on weights that are flat or empty outside of their wrapper.",
        "A model that was never prepared or was unwrapped (reference, reward, generate, a method of the inner model).",
        "Prepare every model; GatheredParameters or summon_full_params around it.",
        "The model stays its own object: any method, sub-module or generate works, there is nothing to unwrap.",
        (
            "huggingface/trl#669",
            "huggingface/transformers#24643",
            "huggingface/accelerate#3825",
            "pytorch/pytorch#111958",
        ),
        ("unwrapped_model", "reference_before_training"),
    ),
    Known(
        "shape of a partitioned weight",
        "DeepSpeed ZeRO-3",
        (
            r"shape '\[-1, 0\]' is invalid",
            r"size mismatch for .*torch\.size\(\[0\]\)",
            r"the size of tensor [ab] \(\d+\) must match the size of tensor [ab] \(0\)",
            r"the size of tensor a \(0\) must match",
            r"but got weight of shape \[0\]",
        ),
        "Code read the shape or the values of a weight that has size zero outside of its forward.",
        "A partitioned parameter is a placeholder; what reads it directly (a fused loss, resizing, saving an adapter)"
        " sees nothing.",
        "GatheredParameters around it, fused losses off, trainer.save_model instead of save_pretrained.",
        "Shapes and values are whole everywhere, and what is saved is read back and compared.",
        (
            "huggingface/transformers#25241",
            "huggingface/trl#3368",
            "huggingface/peft#2500",
            "linkedin/Liger-Kernel#767",
        ),
        ("shape_of_embedding", "fused_loss_reads_head", "save_adapter"),
    ),
    Known(
        "mixed plain and distributed tensors",
        "FSDP2",
        (r"got mixed torch\.tensor and dtensor",),
        "An operation met a sharded parameter (a DTensor) and a plain tensor.",
        "The parameter was used outside of its module's forward, where it is not gathered.",
        "Use it inside of the forward, or gather it with full_tensor().",
        "A sharded parameter mixes with plain tensors: it is gathered through autograd.",
        ("pytorch/pytorch#153354", "pytorch/pytorch#156535"),
        ("weight_regulariser", "unwrapped_model", "dummy_loss_over_unused_adapter"),
    ),
    Known(
        "backward in evaluation mode",
        "DeepSpeed ZeRO-3",
        (r"backward pass is invalid for module in evaluation mode",),
        "backward() was called while the model was in eval mode.",
        "The engine tells training from evaluation by module.training.",
        "model.train() before backward.",
        "Only the mode of gradients counts.",
        ("modelscope/ms-swift#3107", "Lightning-AI/pytorch-lightning#19467"),
        ("backward_in_eval_mode",),
    ),
    Known(
        "inference tensors",
        "all",
        (
            r"inference tensors cannot be saved for backward",
            r"inplace update to inference tensor",
        ),
        "A tensor that was made under torch.inference_mode is part of a training step.",
        "An evaluation under inference_mode filled buffers that training uses again (inferred).",
        "torch.no_grad in place of inference_mode.",
        "The engine's buffers are always made outside of inference mode.",
        ("OpenRLHF/OpenRLHF#118", "microsoft/LMOps#128"),
        ("backward_in_eval_mode",),
    ),
    Known(
        "recomputation differs",
        "DeepSpeed ZeRO-3 with adapters, FSDP",
        (
            r"recomputed values for the following tensors have different metadata",
            r"a different number of tensors was saved",
        ),
        "Checkpointing without reentrance compares what it computes again with the first time, and they differ.",
        "Frozen weights are partitioned again before the comparison, which then sees size zero; or the"
        " forward is random.",
        "use_reentrant=True, or no checkpointing.",
        "Shapes never change; both kinds of checkpointing are tested with LoRA at every stage.",
        ("huggingface/transformers#47254", "huggingface/trl#5217", "huggingface/transformers#34928"),
        ("lora_recomputed",),
    ),
    Known(
        "nothing requires a gradient",
        "all",
        (r"element 0 of tensors does not require grad",),
        "The loss does not depend on anything that is trained.",
        "Everything is frozen, or reentrant checkpointing got inputs that need no gradient, as with LoRA.",
        "model.enable_input_require_grads(), or use_reentrant=False.",
        "The commands do that for LoRA. `shardproof doctor` names what is frozen.",
        ("huggingface/transformers#29982", "huggingface/peft#1142", "deepspeedai/DeepSpeed#3339"),
        ("lora_with_reentrant_checkpointing",),
    ),
    Known(
        "stale prefetch",
        "DeepSpeed ZeRO-3",
        (r"pop from an empty deque", r"in the parameter fetch queue", r"invalidate trace cache"),
        "The order in which modules ran is not the one that was recorded.",
        "A recorded trace is used after hooks were taken off for a generation, or after a resume.",
        "Newer releases; the line `Invalidate trace cache` alone is harmless.",
        "Prefetching is a guess: a wrong one costs time, never an error, and is counted in stats().",
        ("huggingface/trl#1543", "deepspeedai/DeepSpeed#6870", "huggingface/transformers#23693"),
        ("generate_between_steps",),
    ),
    Known(
        "batch sizes that do not multiply",
        "DeepSpeed",
        (r"train_batch_size is not equal to micro_batch_per_gpu",),
        "Three coupled numbers in the configuration contradict each other.",
        "The world size was read as 1 before communication began, or one number was set by hand.",
        "Set micro-batch and accumulation only.",
        "The global batch follows from micro-batch, accumulation and processes, and is printed.",
        ("deepspeedai/DeepSpeed#4703", "deepspeedai/DeepSpeed#3228", "huggingface/accelerate#1324"),
        ("accumulation_changes",),
    ),
    Known(
        "flat buffer of one dtype",
        "FSDP1",
        (r"must flatten tensors with uniform (dtype|requires_grad)",),
        "Parameters of different dtypes, or frozen and trained ones, would share one flat buffer.",
        "FSDP1 puts all of a unit into one buffer; LoRA over a half-precision base has two kinds.",
        "use_orig_params=True, one dtype for all.",
        "Each dtype, and trained and frozen ones, have buffers of their own.",
        ("axolotl-ai-cloud/axolotl#1482", "huggingface/trl#1723", "pytorch/pytorch#104690"),
        ("mixed_dtypes",),
    ),
    Known(
        "tensors on two devices",
        "all",
        (r"expected all tensors to be on the same device",),
        "Part of the model, or of the state, lies on another device than the inputs.",
        "A sub-model that nothing calls was left on the CPU, or offloaded state is used without moving it.",
        "Switch the unused part off (ENABLE_AUDIO_OUTPUT=0 for Qwen-Omni), move it, no offload.",
        "shard() moves everything to one device and says what lay elsewhere; `shardproof doctor` says so before.",
        ("modelscope/ms-swift#3824", "deepspeedai/DeepSpeed#5538", "hiyouga/LlamaFactory#2493"),
        ("talker_loaded_elsewhere",),
    ),
    Known(
        "meta tensors without values",
        "DeepSpeed ZeRO-3, transformers",
        (r"cannot copy out of meta tensor",),
        "Weights were never loaded: a parameter has a shape and no values.",
        "The loader fills meta tensors in, and something changed the way it finds them (inferred).",
        "Pin transformers to a release that works together.",
        "shard() refuses such a model and names the parameter.",
        ("huggingface/transformers#45397", "modelscope/ms-swift#9345"),
    ),
    Known(
        "another number of ranks",
        "DeepSpeed",
        (r"used a dp world size of \d+ but the current world size is",),
        "The checkpoint was written on another number of GPUs.",
        "Its parts are keyed by rank.",
        "The universal format, the same number of GPUs, or weights only.",
        "A checkpoint saved at any stage and number of ranks loads at any other.",
        ("deepspeedai/DeepSpeed#2898", "deepspeedai/DeepSpeed#3810"),
        ("other_stage_in_mid_training",),
    ),
    Known(
        "no_sync and ZeRO",
        "DeepSpeed ZeRO-2 and 3",
        (r"no_sync context manager is incompatible with gradient partitioning",),
        "Gradient accumulation went through no_sync, which this stage refuses.",
        "DeepSpeed 0.16 added the check, and Accelerate calls no_sync on each accumulation.",
        "Newer releases of both; some pinned deepspeed==0.15.4.",
        "no_sync works at every stage.",
        ("deepspeedai/DeepSpeed#6793", "huggingface/accelerate#3481", "hiyouga/LlamaFactory#6194"),
        ("accumulation_with_no_sync",),
    ),
    Known(
        "CPUAdam was not built",
        "DeepSpeed with offload",
        (
            r"has no attribute 'ds_opt_adam'",
            r"loading extension module cpu_adam",
            r"unable to jit load the cpu_adam op",
        ),
        "DeepSpeed's own Adam for the CPU could not be compiled.",
        "The compilation failed before (CUDA versions that differ, no Python headers), and this error hides it.",
        "ds_report says what is missing; remove ~/.cache/torch_extensions.",
        "Nothing is compiled to start.",
        ("deepspeedai/DeepSpeed#1846", "deepspeedai/DeepSpeed#1077"),
    ),
    Known(
        "several models with one Accelerator",
        "Accelerate with DeepSpeed",
        (r"can't use same `?accelerator\(?\)?`? instance with multiple models",),
        "More than one model was prepared with one DeepSpeed configuration.",
        "The plugin is global state.",
        "One Accelerator for each model, or several plugins.",
        "An engine belongs to its model: shard as many as you like, each at its own stage.",
        ("huggingface/accelerate#253", "huggingface/accelerate#2496"),
        ("several_models",),
    ),
    Known(
        "modules to save",
        "DeepSpeed ZeRO-3 with PEFT",
        (r"ds_status == zeroparamstatus\.available", r"zeroparamstatus\.not_available"),
        "A partitioned parameter was used as if it were there.",
        "A copy of a partitioned module, as PEFT makes for modules_to_save, is empty; or the module ran"
        " outside of hooks.",
        "Put these modules into target_modules.",
        "Adapters are made before sharding, and a deep copy of a sharded model works.",
        ("huggingface/peft#2450", "huggingface/peft#2603", "deepspeedai/DeepSpeed#7669"),
        ("modules_to_save",),
    ),
    Known(
        "out of memory",
        "all",
        (
            r"(cuda|hip|xpu) out of memory",
            r"torch\.(cuda\.)?outofmemoryerror",
            r"defaultcpuallocator: (can't|not enough)",
        ),
        "A rank needed more memory than there is.",
        "Weights, gradients, optimizer state, gathered units and activations together; saving and"
        " generating gather more.",
        "A higher stage, checkpointing, fewer rows at once, shorter rows.",
        "`shardproof plan` shows what each stage holds before anything is trained, and what fits.",
        ("huggingface/transformers#12587", "huggingface/accelerate#3232"),
    ),
    Known(
        "ZeRO-3 and quantised loading",
        "DeepSpeed ZeRO-3",
        (r"zero-?3 is not compatible with `?low_cpu_mem_usage",),
        "A 4- or 8-bit model was to be loaded under ZeRO-3.",
        "Loading quantised weights and partitioning while loading exclude each other.",
        "ZeRO-2, or FSDP with QLoRA.",
        "A packed base stays whole on each rank, frozen; adapters are sharded.",
        ("huggingface/peft#306", "huggingface/transformers#26412"),
    ),
    Known(
        "a rank uses other modules",
        "DeepSpeed ZeRO-3; any, over gloo",
        (r"disagreement .*between rank ?\d+", r"op\.preamble\.length <= op\.nbytes"),
        "Ranks came to different modules at the same time.",
        "They evaluate or generate unequal amounts, or their data chose other paths.",
        "No evaluation during training; equal numbers of batches on every rank.",
        "Ranks that differ lend each other their slices.",
        ("hiyouga/LlamaFactory#4428", "huggingface/transformers#20130"),
        ("evaluation_on_some_ranks", "different_paths"),
    ),
    Known(
        "weights changed before backward",
        "shardproof",
        (
            r"were changed between the forward pass that used them and",
            r"one of the variables needed for gradient.*inplace",
        ),
        "Weights were changed after the forward pass that used them and before its backward pass.",
        "An optimizer step or an edit in place came between.",
        "Call backward before the step.",
        "The error names the parameter. Run backward before the step, or the forward pass again after it.",
        ("deepspeedai/DeepSpeed#7811",),
        ("ema_and_weight_edits",),
    ),
)
