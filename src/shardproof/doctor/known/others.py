"""Known errors of NCCL, launchers and devices, and further ones of other engines: see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

OTHERS = (
    Known(
        "two ranks on one GPU",
        "all, over NCCL",
        (r"duplicate gpu detected ?: ?rank \d+ and rank \d+", r"nccl\w* error.*invalid usage", r"ncclInvalidUsage"),
        "Two processes of a job use the same GPU, which NCCL refuses.",
        "More processes were started than there are GPUs, or a process did not choose the GPU of its local rank"
        " (a default device in the code, CUDA_VISIBLE_DEVICES of one GPU for all).",
        "torch.cuda.set_device(LOCAL_RANK) before anything else; one process per GPU.",
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
        "The wrong network interface, a firewall between nodes, a broken InfiniBand or plugin setting, too little"
        " shared memory in a container; or another rank died first, and its own error is in its log.",
        "Look at the first rank that failed. NCCL_DEBUG=INFO shows interface and transport; NCCL_SOCKET_IFNAME chooses"
        " the interface, NCCL_IB_DISABLE=1 disables InfiniBand; unset variables preset by the image (NCCL_GRAPH_FILE).",
        "NCCL is the same here. The trial of `shardproof doctor` sends between all ranks first and says how fast.",
        ("NVIDIA/nccl#834", "NVIDIA/nccl#1240", "NVIDIA/nccl#975", "pytorch/pytorch#149984"),
        echo=True,
    ),
    Known(
        "a port is taken",
        "all, under torchrun and other launchers",
        (r"server socket has failed to (bind|listen)", r"errno: 98 - address already in use"),
        "The rendezvous port of the ranks is in use.",
        "Another job on the machine uses the same port (29500 by default), or one that crashed"
        " has left processes behind.",
        "--master_port (torchrun: --master-port) with another number; end the processes left from the old job.",
        "--nproc picks a free port itself; under an outer torchrun, torchrun chooses it.",
        ("meta-pytorch/torchtune#1025", "deepspeedai/DeepSpeed#3916", "OpenRLHF/OpenRLHF#618"),
    ),
    Known(
        "a process was killed",
        "all, under torchrun and other launchers",
        (r"exit ?code ?: -9\b", r"return code = -9\b", r"signal 9 \(SIGKILL\)", r"(Signals\.|ended by )SIGKILL"),
        "A rank was killed from outside, most often by the kernel because the host ran out of memory.",
        "Each process reads the full model into the host's memory before it is sharded, or offload, data"
        " loaders or pinned memory use up the rest (`dmesg` names the process that was killed).",
        "Fewer processes per machine, low_cpu_mem_usage or loading on one rank only, more memory; check the"
        " container's limit.",
        "In `sft` and `rlhf` each rank reads only the part of the weights it keeps. `shardproof plan --offload`"
        " shows how much is kept on the host.",
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
        "A token or a position has no row in its table; on CUDA the line named may be a later one.",
        "The tokenizer has more tokens than the embedding has rows, or a row is longer than the model has positions.",
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
        "Step after step overflowed, until the scale could not go any lower.",
        "fp16 holds numbers up to 65,504; models trained in bf16 exceed that, or the loss itself is inf or nan.",
        "bf16 instead of fp16, a smaller learning rate; check the rows.",
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
        "A pass ended before all prefetched parameters had been used.",
        "Modules were prefetched in the order of an earlier pass, and this one took another path: a branch that"
        " depends on the data, an evaluation between steps, or generation.",
        "Other releases of DeepSpeed, stage3_prefetch_bucket_size 0, or the same path through the model on every pass.",
        "Parameters prefetched for another path are dropped, and gathered again when they are needed.",
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
        "It was used outside the forward of the wrapped module, for example by generate() of the unwrapped model.",
        "Call the wrapped model, once before generate() if need be, or work inside summon_full_params.",
        "A parameter may be used anywhere; generate() works on the sharded model.",
        ("pytorch/pytorch#82461", "RLinf/RLinf#267"),
    ),
    Known(
        "a trace that is recorded anew",
        "DeepSpeed ZeRO-3",
        (r"invalidate trace cache @ step",),
        "The order of modules differs from the previous step, so prefetching records it again. The line alone is"
        " harmless.",
        "An evaluation, a generation, or data that take another path through the model.",
        "Nothing; if it appears at every step, prefetching does not help there.",
        "Prefetching is a guess: a wrong one costs time, never an error, and is counted in stats().",
        ("deepspeedai/DeepSpeed#6870", "huggingface/trl#1543"),
        ("different_paths",),
        echo=True,
    ),
)
