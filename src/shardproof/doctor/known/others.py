"""What is known of errors of NCCL, launchers and devices, and more of other engines: see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

OTHERS = (
    Known(
        "two ranks on one GPU",
        "all, over NCCL",
        (r"duplicate gpu detected ?: ?rank \d+ and rank \d+", r"nccl\w* error.*invalid usage", r"ncclInvalidUsage"),
        "Two processes of a job work on the same GPU, which NCCL refuses.",
        "More processes were started than there are GPUs, or a process did not choose the GPU of its local rank"
        " (a default device in the code, CUDA_VISIBLE_DEVICES of one GPU for all).",
        "torch.cuda.set_device(LOCAL_RANK) before anything else; as many processes as GPUs.",
        "Each rank takes the GPU of its local rank; `shardproof doctor` refuses more processes than GPUs.",
        (
            "NVIDIA/nccl#1241",
            "facebookresearch/ViewDiff#24",
            "NVIDIA/Megatron-LM#661",
            "verl-project/verl#1096",
        ),
    ),
    Known(
        "NCCL cannot use the network",
        "all, over NCCL",
        (
            r"nccl(System|Remote)Error: [^\n]*",
            r"nccl error[^\n]*unhandled system error",
            r"socketStartConnect: Connect to [^\n]* failed",
        ),
        "A system call of NCCL failed, or the rank at the other end is gone.",
        "The wrong network interface, a firewall between nodes, a broken InfiniBand or plugin setting, little shared"
        " memory in a container; or another rank died first, and its own error stands in its log.",
        "Look at the first rank that failed. NCCL_DEBUG=INFO shows interface and transport; NCCL_SOCKET_IFNAME chooses"
        " the interface, NCCL_IB_DISABLE=1 leaves InfiniBand out; unset what an image has preset (NCCL_GRAPH_FILE).",
        "NCCL is the same here. The trial of `shardproof doctor` sends between all ranks first and says how fast.",
        ("NVIDIA/nccl#834", "NVIDIA/nccl#1240", "NVIDIA/nccl#975", "pytorch/pytorch#149984"),
        echo=True,
    ),
    Known(
        "a port is taken",
        "all, under torchrun and other launchers",
        (r"server socket has failed to (bind|listen)", r"errno: 98 - address already in use"),
        "The port at which ranks are to meet is in use.",
        "Another job runs on the machine with the same port (29500 unless it is named), or one that ended"
        " badly has left processes.",
        "--master_port (torchrun: --master-port) with another number; end what is left of the old job.",
        "--nproc takes a free port by itself; under an outer torchrun it is torchrun's.",
        ("meta-pytorch/torchtune#1025", "deepspeedai/DeepSpeed#3916", "OpenRLHF/OpenRLHF#618"),
    ),
    Known(
        "a process was killed",
        "all, under torchrun and other launchers",
        (r"exit ?code ?: -9\b", r"return code = -9\b", r"signal 9 \(SIGKILL\)", r"(Signals\.|ended by )SIGKILL"),
        "A rank was ended from outside, most often by the kernel, because the host's memory was used up.",
        "Each process reads the whole model into the host's memory before it is sharded, or offload, data"
        " loaders or pinned memory take what is left (`dmesg` names who was killed).",
        "Fewer processes a machine, low_cpu_mem_usage or loading on one rank only, more memory; a limit of"
        " the container.",
        "`sft` and `rlhf` read of the weights what each rank keeps. `shardproof plan --offload` says what"
        " lies on the host.",
        (
            "lm-sys/FastChat#568",
            "meta-llama/llama#856",
            "hpcaitech/ColossalAI#3514",
            "zai-org/ChatGLM2-6B#525",
            "deepspeedai/DeepSpeed#3160",
        ),
        echo=True,
    ),
    Known(
        "an index outside of a table",
        "all, on CUDA",
        (r"device-side assert triggered", r"srcIndex < srcSelectDimSize", r"IndexError: index out of range in self"),
        "A token or a position has no row in its table; on CUDA the line that is named may be a later one.",
        "The tokenizer has more tokens than the embedding rows, or a row is longer than the positions of the model.",
        "model.resize_token_embeddings(len(tokenizer)), shorter rows; run it on the CPU, or with"
        " CUDA_LAUNCH_BLOCKING=1, to see the line.",
        "The same. `shardproof doctor` compares tokenizer and embedding before a run.",
        (
            "huggingface/transformers#1848",
            "huggingface/transformers#24698",
            "huggingface/transformers#11943",
            "shibing624/MedicalGPT#275",
        ),
    ),
    Known(
        "the loss scale is at its minimum",
        "DeepSpeed with fp16",
        (r"current loss scale already at minimum",),
        "Every step of a row overflowed, until the scale could not go down any more.",
        "fp16 holds numbers up to 65,504; models trained in bf16 go beyond, or the loss itself is inf or nan.",
        "bf16 instead of fp16, a smaller learning rate, a look at the rows.",
        "--precision bf16, or fp32. `shardproof doctor` says whether the first gradients are finite.",
        (
            "modelscope/ms-swift#4374",
            "deepspeedai/DeepSpeedExamples#418",
            "hiyouga/LlamaFactory#315",
            "ymcui/Chinese-LLaMA-Alpaca#534",
        ),
    ),
    Known(
        "parameters still in flight",
        "DeepSpeed ZeRO-3",
        (r"still have inflight params", r"'status': 'INFLIGHT'"),
        "A pass ended while parameters that were fetched ahead had not been used.",
        "Modules were fetched in the order of an earlier pass, and this one took another way: a branch that"
        " depends on the data, an evaluation between steps, generation.",
        "Other releases of DeepSpeed, stage3_prefetch_bucket_size 0, one way through the model on every pass.",
        "What was fetched for another way is dropped, and gathered again when it is wanted.",
        (
            "deepspeedai/DeepSpeed#5828",
            "deepspeedai/DeepSpeed#5648",
            "deepspeedai/DeepSpeed#3156",
            "deepspeedai/DeepSpeed#3068",
        ),
        ("different_paths",),
    ),
    Known(
        "weights that are not gathered",
        "FSDP1",
        (r"has a non-zero number of elements, but its data is not allocated yet",),
        "A parameter was used while its memory was released.",
        "It was used outside of the forward of the wrapped module, for example by generate() of the unwrapped model.",
        "Call the wrapped model, once before generate() if need be, or inside of summon_full_params.",
        "A parameter may be used anywhere; generate() works on the sharded model.",
        ("pytorch/pytorch#82461", "RLinf/RLinf#267"),
    ),
    Known(
        "a trace that is recorded anew",
        "DeepSpeed ZeRO-3",
        (r"invalidate trace cache @ step",),
        "The order of modules is not the one of the step before, so prefetching learns it anew. The line alone is"
        " harmless.",
        "An evaluation, a generation or data that choose another way through the model.",
        "Nothing; if it comes with every step, prefetching is of no use there.",
        "Prefetching is a guess: a wrong one costs time, never an error, and is counted in stats().",
        ("deepspeedai/DeepSpeed#6870", "huggingface/trl#1543"),
        ("different_paths",),
        echo=True,
    ),
)
