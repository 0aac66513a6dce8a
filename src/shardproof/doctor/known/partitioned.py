"""Known errors of partitioned parameters (DeepSpeed ZeRO-3): see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

PARTITIONED = (
    Known(
        "shape of a partitioned weight",
        "DeepSpeed ZeRO-3",
        (
            r"shape '\[-1, 0\]' is invalid",
            r"the size of tensor [ab] \(\d+\) must match the size of tensor [ab] \(0\)",
            r"the size of tensor a \(0\) must match",
            r"but got weight of shape \[0\]",
        ),
        "Code read the shape or the values of a weight that has size zero outside its forward.",
        "A partitioned parameter is a placeholder; code that reads it directly (a fused loss, resizing, saving an"
        " adapter) finds it empty.",
        "GatheredParameters around it, fused losses off, trainer.save_model instead of save_pretrained.",
        "Shapes and values are complete everywhere, and saved files are read back and compared.",
        (
            "huggingface/transformers#25241",
            "huggingface/trl#3368",
            "huggingface/peft#2500",
            "linkedin/Liger-Kernel#767",
        ),
        ("shape_of_embedding", "fused_loss_reads_head", "save_adapter"),
    ),
    Known(
        "embeddings resized under ZeRO-3",
        "DeepSpeed ZeRO-3",
        (
            r"\A[^\n]{0,200}(?P<told>the expanded size of the tensor \(0\) must match the existing size)",
            # In a log it may come from anything.
            r"(embed_tokens|word_embeddings|(input|output|new|token)_embed|lm_head|resize_token|deepspeed|zero_?3)"
            r"[\s\S]{0,1500}?"
            r"(?P<told>the expanded size of the tensor \(0\) must match the existing size)",
        ),
        "Rows were written into an embedding or a head that had size zero at that moment.",
        "A partitioned weight is a placeholder outside its forward. Code that gives new tokens their rows"
        " (weight.data[-n:] = ...), or creates a new head, writes into the placeholder or copies its size.",
        "GatheredParameters([weight], modifier_rank=0) around it; resize_token_embeddings of a newer transformers; or"
        " add the tokens once, in one process without DeepSpeed, and save model and tokenizer.",
        "Weights keep their shape, and an edit reaches every slice. Resize before the model is sharded, or inside"
        " `with shardproof.whole(model, writeback=True):` and before the optimizer is created; elsewhere a changed"
        " shape is refused, and the parameter named.",
        (
            "huggingface/transformers#32196",
            "huggingface/transformers#26112",
            "huggingface/transformers#41959",
            "huggingface/transformers#25241",
        ),
        ("shape_of_embedding",),
    ),
    Known(
        "whole weights for a partitioned model",
        "DeepSpeed ZeRO-3",
        (
            r"size mismatch for \S+: copying a param with shape torch\.size\(\[[^\]]*\]\) from checkpoint,"
            r" the shape in current model is torch\.size\(\[0\]\)",
        ),
        "Full weights were loaded into a model whose parameters are placeholders of size zero.",
        "With a stage 3 configuration in force (TrainingArguments(deepspeed=...), HfDeepSpeedConfig, zero.Init) a model"
        " is partitioned as it is created, and load_state_dict does not gather: a reward model, a reference or a second"
        " checkpoint that is loaded by hand.",
        "from_pretrained from a folder, which gathers as it loads; GatheredParameters(parameters, modifier_rank=0)"
        " around load_state_dict; create and load the model before the configuration; a lower stage for that model.",
        "load_state_dict takes full weights at every stage. shardproof.load_pretrained, `sft` and `rlhf` have each rank"
        " read only its own part of a model.",
        (
            "deepspeedai/DeepSpeed#3574",
            "Lightning-AI/pytorch-lightning#18648",
            "deepspeedai/DeepSpeedExamples#560",
            "allenai/open-instruct#583",
        ),
        ("weights_loaded_late",),
    ),
    Known(
        "a file of empty weights",
        "DeepSpeed ZeRO-3",
        (r"size mismatch for \S+: copying a param with shape torch\.size\(\[0\]\) from checkpoint",),
        "The file holds weights with no elements: placeholders were saved, not the model.",
        "Under stage 3 a state dict is empty until it is gathered. save_pretrained or torch.save wrote it on"
        " one rank, ungathered.",
        "If the engine's own checkpoint is there (global_step...), zero_to_fp32.py turns it into weights. Next time"
        " stage3_gather_16bit_weights_on_model_save: true and trainer.save_model, or accelerator.get_state_dict.",
        "Saved weights are complete, and are read back and compared. `shardproof convert` reads DeepSpeed's engine"
        " checkpoints.",
        ("huggingface/transformers#20082", "axolotl-ai-cloud/axolotl#933", "FlagOpen/FlagEmbedding#873"),
        ("save_and_read_back",),
    ),
    Known(
        "a device_map under ZeRO-3",
        "transformers with DeepSpeed ZeRO-3",
        (r"zero-?3 is not compatible with (`?low_cpu_mem_usage|passing a `?device_map)",),
        "from_pretrained was given device_map or low_cpu_mem_usage=True, and stage 3 is on.",
        "Both decide where a weight goes as it is read: device_map='auto' spreads one model over the GPUs that"
        " one process sees, ZeRO-3 splits it across processes. In older releases device_map sets low_cpu_mem_usage, and"
        " so does loading in 4 or 8 bits.",
        "Remove both from from_pretrained under ZeRO-3 (device_map=None); nothing else is needed. With a base in 4 or 8"
        " bits: ZeRO-2, or FSDP with QLoRA.",
        "There is no device_map: in `sft`, `rlhf` and shardproof.load_pretrained each rank reads only the part of the"
        " weights it keeps. With --quantize nf4 a 4-bit base is sharded too, at stage 3 like any other.",
        (
            "huggingface/accelerate#2543",
            "QwenLM/Qwen#833",
            "hiyouga/LlamaFactory#199",
            "huggingface/peft#306",
            "huggingface/transformers#26412",
        ),
    ),
    Known(
        "a parameter that was not gathered",
        "DeepSpeed ZeRO-3",
        (
            r"assertionerror: \{'id': [^{}]{0,80}'status': 'NOT_AVAILABLE'(?![^{}]{0,300}'ds_shape': \(0,\))",
            r"ds_status == zeroparamstatus\.available(?![\s\S]{0,2000}'ds_shape': \(0,\))",
            r"zeroparamstatus\.not_available",
        ),
        "A partitioned parameter was used while its values were not there.",
        "Its module ran where DeepSpeed had not gathered it: past the engine (generate or a part of engine.module),"
        " in a different order from the recorded one, or recomputed inside a checkpoint.",
        "Call the engine; GatheredParameters around code that goes past it; the other kind of checkpointing"
        " (use_reentrant); newer releases; stage 2.",
        "Reading a parameter gathers it, anywhere and in any order.",
        (
            "deepspeedai/DeepSpeed#4194",
            "deepspeedai/DeepSpeed#4533",
            "deepspeedai/DeepSpeed#1903",
            "modelscope/ms-swift#3622",
        ),
        ("forward_past_the_wrapper", "generate_between_steps"),
    ),
    Known(
        "a copy of a partitioned module",
        "DeepSpeed ZeRO-3 with PEFT, or with a reference model",
        (r"'status': 'NOT_AVAILABLE'[^{}]{0,300}'ds_shape': \(0,\)",),
        "A parameter with no elements was used: 'ds_shape': (0,).",
        "A module was copied while its parameters were placeholders, so that there is nothing to gather: PEFT's"
        " modules_to_save, or a reference model made by a deep copy.",
        "A newer PEFT, which gathers before it copies; these modules in target_modules; the reference loaded on its"
        " own.",
        "Adapters are made before sharding, and a deep copy of a sharded model works.",
        (
            "huggingface/peft#1450",
            "QwenLM/Qwen-VL#103",
            "hiyouga/LlamaFactory#1121",
            "huggingface/peft#2450",
            "huggingface/peft#2603",
            "deepspeedai/DeepSpeed#7669",
        ),
        ("modules_to_save",),
    ),
    Known(
        "stale prefetch",
        "DeepSpeed ZeRO-3",
        (
            # Any deque may be empty: the line above has to be DeepSpeed's.
            r"(partitioned_param_coordinator|parameter_offload|module_fetched_for)[\s\S]{0,1500}?"
            r"(?P<told>IndexError: pop from an empty deque)",
            r"in the parameter fetch queue",
        ),
        "Modules ran in a different order from the recorded one.",
        "A recorded trace is used after hooks were removed for generation, or after a resume.",
        "Newer releases.",
        "Prefetching is a guess: a wrong one costs time, never an error, and is counted in stats().",
        ("huggingface/trl#1543", "deepspeedai/DeepSpeed#6870", "huggingface/transformers#23693"),
        ("generate_between_steps",),
    ),
    Known(
        "a parameter made anew",
        "DeepSpeed ZeRO-3",
        (r"has no attribute 'ds_(status|id|numel|shape|tensor)'",),
        "DeepSpeed met a parameter that it had not prepared.",
        "A module created a new nn.Parameter after the model was sharded (in its forward, or for more positions),"
        " or the model was created outside deepspeed.zero.Init although the configuration says stage 3.",
        "Create parameters in __init__ only, or write into the old one under no_grad; build the model after the"
        " configuration is known.",
        "A parameter that a module registers later is sharded when the model is next entered. An optimizer created"
        " earlier does not know it.",
        (
            "deepspeedai/DeepSpeed#1757",
            "baichuan-inc/Baichuan2#215",
            "huggingface/transformers#24792",
            "huggingface/peft#623",
        ),
    ),
)
