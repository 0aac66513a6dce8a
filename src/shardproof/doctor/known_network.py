"""What is known of errors of NCCL itself: from public threads, read as excerpts."""

from __future__ import annotations

from shardproof.doctor.known import Known

NETWORK = (
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
    ),
)
