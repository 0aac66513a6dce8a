"""Known errors of settings and of the program around an engine: see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

WRONG_USE = (
    Known(
        "weights in fp16 under a loss scale",
        "all, with fp16",
        (r"attempting to unscale fp16 gradients",),
        "The loss is scaled for fp16, and the trained weights themselves are in fp16.",
        "Weights were loaded with torch_dtype=float16, or adapters took over the dtype of their base. The scaler needs"
        " fp32 master weights.",
        "Load what is trained in fp32 (adapters too, as newer releases of PEFT do), or bf16 without a scale.",
        "Master weights are fp32 with --precision fp16 and bf16. `shardproof doctor` names their dtype.",
        ("haotian-liu/LLaVA#363", "bitsandbytes-foundation/bitsandbytes#945", "yk7333/d3po#6", "mlpc-ucsd/BLIVA#29"),
    ),
    Known(
        "a method of the model inside a wrapper",
        "DDP, DeepSpeed, FSDP1",
        (r"'(distributeddataparallel|dataparallel|deepspeedengine|fullyshardeddataparallel)' object has no attribute",),
        "The program asked the wrapper for an attribute that only the model inside it has.",
        "The engine returns a different object from the model, with forward and few other methods.",
        "model.module, or accelerator.unwrap_model(model); with sharded weights, only in a context that gathers them.",
        "Nothing is wrapped: the model stays the object it was, with its methods.",
        (
            "huggingface/transformers#18974",
            "huggingface/accelerate#109",
            "huggingface/trl#340",
            "huggingface/trl#3063",
        ),
        ("unwrapped_model",),
    ),
    Known(
        "a tensor of the CPU over NCCL",
        "all, over NCCL",
        (r"no backend type associated with device type", r"tensors must be CUDA and dense"),
        "A collective was given a CPU tensor, and the process group has only NCCL.",
        "A small tensor (a length, an object) was not moved to the GPU, or the library found no GPU on this rank.",
        "Move it, or init_process_group('cpu:gloo,cuda:nccl'); check whether this rank sees its GPU.",
        "Messages between ranks go over the engine's own gloo group, gathers and reductions over NCCL.",
        (
            "Lightning-AI/pytorch-lightning#18803",
            "mistralai/mistral-inference#252",
            "zai-org/CogVLM#328",
            "unslothai/unsloth-zoo#129",
        ),
    ),
    Known(
        "ranks that never meet at the start",
        "all, under torchrun and other launchers",
        (
            r"timed out after \d+ seconds waiting for (clients|workers)",
            r"\d+/\d+ (clients|workers) joined",
            r"the client socket has (timed out|failed to connect)",
        ),
        "Not all ranks of the job reached the rendezvous.",
        "Fewer processes were started than the job was configured for, one node has a different address or port, a"
        " firewall is in the way, or a rank died earlier (its own log says why).",
        "Compare the number of nodes, the processes, node rank, address and port on every node.",
        "--nproc starts all ranks of a machine; `shardproof submit` writes a multi-machine job with a single address.",
        ("OpenRLHF/OpenRLHF#1040", "pytorch/pytorch#111805", "hiyouga/LlamaFactory#3632", "MLI-lab/DeepDeWedge#20"),
        echo=True,
    ),
    Known(
        "two configurations that contradict each other",
        "DeepSpeed under transformers",
        (r"config values that mismatch trainingarguments",),
        "The file for DeepSpeed and the options of the Trainer give the same thing different values.",
        "Batch sizes, learning rate, warm-up and precision are set in both.",
        "'auto' for each of them in the file.",
        "A DeepSpeed file given with --deepspeed is read as options; 'auto' there takes the option's value.",
        (
            "huggingface/transformers#12021",
            "huggingface/transformers#29348",
            "CarperAI/trlx#376",
            "hiyouga/LlamaFactory#201",
        ),
    ),
    Known(
        "too little shared memory",
        "all, in containers",
        (r"insufficient shared memory", r"killed by signal: bus error", r"/dev/shm[^\n]*no space left"),
        "Processes that read the data had no room in /dev/shm to hand it over.",
        "Containers have 64 MB of it by default; data loader workers and NCCL use it.",
        "docker run --ipc=host or --shm-size, an emptyDir of medium Memory in Kubernetes; fewer workers.",
        "The same. --workers 0 has each rank read its rows itself.",
        ("pytorch/pytorch#5040", "pytorch/pytorch#108861", "open-mmlab/mmsegmentation#1356"),
    ),
    Known(
        "an inner module that took itself for the root",
        "FSDP1",
        (r"_is_root`? should not have been set yet",),
        "Part of the model was run, or saved, before the full model.",
        "The first module of FSDP that is entered becomes the root; a call of an inner one, or a state dict taken"
        " before the first forward, makes it a root of its own.",
        "Run the full model once first, and enter it through the outermost module only.",
        "There is one engine for a model, made when it is sharded; any part may be called first.",
        ("huggingface/trl#1704", "pytorch/pytorch#113496", "huggingface/accelerate#3258"),
    ),
    Known(
        "backward twice through one graph",
        "all",
        (r"trying to backward through the graph a second time",),
        "A second backward pass reached a part of the graph that the first one had freed.",
        "Something from an earlier step is still attached (a cache, a state between batches, a running sum of the"
        " loss), or a custom checkpointing implementation runs a backward pass inside.",
        "detach() everything that is carried over; torch's own checkpointing instead of a library's.",
        "The same: it is torch's rule. Nothing that the engine keeps between steps is part of a graph.",
        ("hiyouga/LlamaFactory#10395", "deepspeedai/DeepSpeed#4528", "huggingface/transformers#43203"),
    ),
    Known(
        "an activation changed in place",
        "all",
        (
            r"modified by an inplace operation: \[[^\]]*\]\]"
            r", which is output \d+ of (?!(asstrided|t|transpose)(backward\d*)?,)\w",
        ),
        "A result of the forward pass that backward needs was changed in place. The text names the operation that made"
        " it (`output 0 of ReluBackward0`: a relu).",
        "x += ..., x[mask] = ..., x.add_(...) or nn.ReLU(inplace=True) on the output of an operation whose backward"
        " reads it: relu, sigmoid, exp, softmax, a product.",
        "x = x + ..., inplace=False, torch.where or x.clone() before the edit."
        " torch.autograd.set_detect_anomaly(True) shows the line whose backward needs x; the edit stands below it.",
        "The same error: torch does not check what it saves under saved-tensor hooks, so the engine's hooks do.",
        (
            "lyongo/NWPU-MOC#4",
            "AggMan96/RK-Net#9",
            "ziqi92/Modof#5",
            "yujianke100/GFDN#4",
        ),
    ),
    Known(
        "a buffer changed in place",
        "DDP",
        (r"modified by an inplace operation: \[torch\.[\w.]*(long|int|short|byte|char|bool)tensor \[[^\]]*\]\]",),
        "An integer tensor that backward needs (positions, indices, a mask) was changed after it was used.",
        "DDP broadcasts buffers in place before each forward pass: with two forward passes before one backward, those"
        " of the first are changed. Or the model's own code counts in place.",
        "DDP(model, broadcast_buffers=False); one forward pass for both; buffer.clone() where it is used.",
        "Buffers are sent once, when the model is sharded.",
        ("pytorch/pytorch#22095", "pytorch/pytorch#70260", "pytorch/pytorch#175024"),
    ),
    Known(
        "a stand-in in place of the optimizer",
        "Accelerate and transformers with DeepSpeed",
        (r"'dummy(optim|scheduler)' object has no attribute",),
        "The stand-in for DeepSpeed's optimizer was used as if it were one.",
        "The file for DeepSpeed has an optimizer, so a stand-in is made, and DeepSpeed puts its own in its place when"
        " the model is prepared. Here it did not: one process was started without a launcher, the loop steps an object"
        " that did not go through prepare(), or a schedule was created from it earlier.",
        "Start it with deepspeed, torchrun or accelerate launch; on one GPU without --deepspeed. Or take `optimizer`"
        " and `scheduler` out of the file. In your own loop, use only what prepare() returns.",
        "There are no stand-ins: the optimizer is torch's from the beginning, on one process as on several. A"
        " file given with --deepspeed is read as options.",
        (
            "huggingface/transformers#24640",
            "huggingface/transformers#26148",
            "modelscope/ms-swift#1775",
            "QwenLM/Qwen-VL#127",
        ),
    ),
    Known(
        "a loss of 0 and a gradient norm of nan",
        "transformers' Trainer",
        (r"['\"]loss['\"]: ?['\"]?(0(\.0+)?|nan)\b['\"]?,[^{}]{0,200}['\"]grad_norm['\"]: ?['\"]?nan\b",),
        "The loss is nan or inf. Where 0 is logged it is not 0: Trainer leaves NaN and inf out of its mean.",
        "fp16, which ends at 65,504, for a model that was trained in bf16; an attention kernel or mask that gives nan,"
        " as for rows of padding that see no token; labels that are all -100, the mean of nothing; too large a step."
        " After one step on such a gradient the weights are nan too (a loss scale leaves that step out).",
        "logging_nan_inf_filter=False and logging_steps=1 show the first bad step. Then bf16 (or fp32) in place of"
        " fp16, attn_implementation='eager' or another kernel, no row without an answer, a smaller learning rate; and"
        " go back to the weights before that step.",
        "NaN is logged as NaN, and three such steps in a row end the run. `sft` leaves out rows from which nothing"
        " is learned. `shardproof doctor` says whether the weights and the first gradients are finite, and names those"
        " that are not.",
        (
            "hiyouga/LlamaFactory#7263",
            "hiyouga/LlamaFactory#8088",
            "hiyouga/LlamaFactory#4160",
            "huggingface/transformers#25065",
            "huggingface/trl#6702",
        ),
    ),
    Known(
        "adapters without a place",
        "PEFT",
        (r"target modules .{0,200}not found in the base model",),
        "No module of the model has a name from the list of targets.",
        "The names are those of another family (W_pack in Baichuan, c_attn in the first Qwen, q_proj in Llama), or the"
        " list came out empty.",
        "Names as print(model) shows them, or all-linear.",
        "--target-modules all-linear is the default; other names are checked before anything is loaded, and the"
        " closest match is suggested.",
        ("hiyouga/LlamaFactory#181", "hiyouga/LlamaFactory#3597", "yangjianxin1/Firefly#23"),
    ),
    Known(
        "more processes than GPUs",
        "all, on CUDA",
        (r"invalid device ordinal",),
        "A process asked for a GPU that it does not see.",
        "More processes were started than there are visible GPUs, or CUDA_VISIBLE_DEVICES renumbers them.",
        "--nproc_per_node equal to the number of GPUs; cuda:LOCAL_RANK in the program.",
        "`shardproof doctor` compares --nproc with the number of GPUs.",
        ("tatsu-lab/stanford_alpaca#67", "yunqing-me/WatermarkDM#8", "hustvl/Vim#61"),
    ),
)
