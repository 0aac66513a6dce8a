"""Known errors of GPUs, installations, launchers, disks and networks: see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

MACHINE = (
    Known(
        "out of memory",
        "all",
        (
            r"(cuda|hip|xpu|mps backend) out of memory",
            r"(cuda|hip|xpu) error: out of memory",
            r"cuda failure[^\n]{0,8}'out of memory'",
            r"torch\.(cuda\.)?outofmemoryerror",
            r"defaultcpuallocator: (can't|not enough)",
        ),
        "A rank needed more memory than there is.",
        "Weights, gradients, optimizer state, gathered units and activations together; saving and"
        " generating gather more.",
        "A higher stage, checkpointing, fewer rows at once, shorter rows.",
        "`shardproof plan` shows, before anything is trained, how much memory each stage needs, and what fits.",
        ("huggingface/transformers#12587", "huggingface/accelerate#3232"),
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
            r"detected mismatch between collectives on ranks",
            r"failed to pass monitoredBarrier",
            r"heartbeat monitor timed out",
        ),
        "One rank waited for a collective that another one never started.",
        "Ranks took different paths: images on some ranks only, experts without tokens, different"
        " numbers of rows or"
        " generated texts, saving or evaluating under `if rank == 0`.",
        "Make every rank call every module equally often (dummy inputs times zero), synced_gpus=True for"
        " generation, leaf"
        " modules for experts, call save on all ranks.",
        "Ranks may take different paths, and if a rank never arrives, all end within 10 s with a message that says who"
        " waits for what, and where.",
        (
            "deepspeedai/DeepSpeed#7170",
            "huggingface/transformers#37186",
            "deepspeedai/DeepSpeed#7461",
            "NVIDIA/nccl#1260",
        ),
        ("images_on_some_ranks", "experts_without_tokens", "generate_to_different_lengths"),
        echo=True,
    ),
    Known(
        "another rank is gone",
        "all, over gloo or NCCL",
        (
            r"connection (closed|reset) by peer \[",
            r"(gloo|nccl|c10d|tcpstore|socketimpl)[^\n]*connection (was )?(closed|reset)",
            r"(recvvalue|sendbytes|recvbytes) failed on",
            r"remote process exited or there was a network error",
            r"ncclremoteerror",
        ),
        "This rank lost its connection to another one, which had already ended.",
        "The first error is that of the other rank (out of memory, an exception, killed); this text is only its echo.",
        "Look for the rank that ended first, in its own output and in the kernel's log.",
        "The rank that ended first is reported once, and the others name its exception.",
        ("NVIDIA/nccl#1260", "NVIDIA/nccl#1324"),
        echo=True,
    ),
    Known(
        "a summary of the launcher",
        "torchrun, accelerate launch",
        (r"errors\.ChildFailedError", r"\bfailed \(exitcode: 1\)"),
        "A process of the job ended with an error. This is the launcher's list of them, not the error.",
        "torchrun prints it last, and the traceback of the process is above it, often far above, or in its own log.",
        "Look for the first `Traceback` of the rank under `Root Cause (first observed failure)`.",
        "The rank that failed first says why, once, as the last thing printed.",
        (
            "Vision-CAIR/MiniGPT-4#237",
            "hpcaitech/ColossalAI#3571",
            "Facico/Chinese-Vicuna#113",
            "yangjianxin1/Firefly#32",
        ),
        summary=True,
    ),
    Known(
        "the terminal was closed",
        "all, under torchrun and other launchers",
        (r"\bgot signal: 1\b", r"closing signal SIGHUP", r"received (1|signals\.sighup) death signal"),
        "The processes were sent a hang-up (SIGHUP) and ended.",
        "The terminal or the connection that the command was started from is gone. nohup protects only the"
        " launcher, which passes the signal of one worker to all.",
        "tmux, screen or a scheduler instead of nohup.",
        "A run ends after its step and saves its weights, and nohup protects all of its processes, unless torchrun"
        " started them. `shardproof submit` writes a job.",
        (
            "pytorch/pytorch#76894",
            "modelscope/ms-swift#5884",
            "zai-org/ChatGLM2-6B#238",
            "keyu-tian/SparK#19",
        ),
    ),
    Known(
        "no process group",
        "all",
        (r"default process group has not been initiali[sz]ed",),
        "Code needed the other ranks, but there is no process group.",
        "A program for several processes was started as one, without its launcher; or the group was destroyed earlier.",
        "torchrun (or accelerate launch, deepspeed) in front of it; init_process_group at the start.",
        "`shardproof.shard` works without a group, as one process, and creates the group that a launcher describes.",
        ("zai-org/ChatGLM-6B#1228", "open-mmlab/mmsegmentation#809", "hustvl/MIMDet#28"),
    ),
    Known(
        "CUDA in a forked process",
        "all, on CUDA",
        (r"cannot re-initialize cuda in forked subprocess",),
        "A process forked from one that already used CUDA tried to use it too.",
        "A dataset or a collator that creates GPU tensors in data loader workers; ranks that are forked after"
        " torch.cuda was first used.",
        "CPU tensors in workers; the start method 'spawn'; no CUDA before the processes are started.",
        "Ranks are forked only where there is no accelerator. Plugin code in workers has to stay on the CPU here too.",
        ("pytorch/pytorch#40403", "traveller59/spconv#408", "shubham-goel/4D-Humans#59"),
    ),
    Known(
        "a full disk",
        "all",
        (
            r"(?<!/dev/shm)(?<!shm\)): no space left on device",
            r"\[errno 28\] no space left on device",
            r"disk quota exceeded",
            r"pytorchstreamwriter failed writing",
            r"inline_container\.cc:\d+\] \. unexpected pos",
        ),
        "A file could not be written completely.",
        "The disk, or the quota of a user or container, is full: a checkpoint holds the weights and two"
        " optimizer states. torch reports it as an error of its archive.",
        "df -h and df -i of that folder; fewer checkpoints kept, another disk. A full /dev/shm or /tmp reads the same.",
        "`shardproof doctor` compares what a run writes with the free space. A full disk costs the checkpoint being"
        " written, but no complete one.",
        ("pytorch/pytorch#10577", "hiyouga/LlamaFactory#1223", "zai-org/ChatGLM-6B#1166", "h2oai/h2o-llmstudio#214"),
    ),
    Known(
        "too many open files",
        "all",
        (r"received 0 items of ancdata", r"\[errno 24\] too many open files"),
        "A process cannot open more files, or receive more from its workers.",
        "Data loader workers pass tensors on as open files, and the limit is 1024 on many machines.",
        "ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system'); fewer workers.",
        "The same. --workers 0 has each rank read its rows itself.",
        ("pytorch/pytorch#973", "pytorch/pytorch#14768", "Project-MONAI/MONAI#701", "Peterande/D-FINE#22"),
    ),
    Known(
        "a worker of the data loader is gone",
        "all",
        (
            r"dataloader worker \(pid[^)\n]*\)?\)? is killed by signal: (killed|terminated|segmentation fault|aborted)",
            r"dataloader worker \(pid\(s\) [^)\n]*\) exited unexpectedly",
        ),
        "A process that reads rows was killed, most often because the host ran out of memory.",
        "Each worker holds its own copy of what it reads, and there are workers x ranks of them.",
        "Fewer workers, or none, which also shows the error of the row itself; more memory for the job.",
        "Rows stay on disk until they are needed. --workers 0 has each rank read its rows itself.",
        (
            "pytorch/pytorch#8976",
            "facebookresearch/maskrcnn-benchmark#195",
            "open-mmlab/mmrotate#501",
            "gemcollector/RL-ViGen#17",
        ),
    ),
    Known(
        "cuBLAS could not begin",
        "all, on CUDA",
        (r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",),
        "CUDA's library for matrices could not be set up, or not get memory.",
        "The memory of the GPU was used up already; or an index was outside of a table in an operation before, and this"
        " is where it shows.",
        "Fewer rows at once; on the CPU, or with CUDA_LAUNCH_BLOCKING=1, an index error shows its line.",
        "`shardproof plan` says what fits, `shardproof doctor` whether every token has a row in the embedding.",
        ("QwenLM/Qwen#120", "OpenBMB/CPM-Bee#73", "wzk1015/video-bgm-generation#27"),
    ),
    Known(
        "illegal memory access",
        "all, on CUDA",
        (r"illegal memory access was encountered",),
        "A kernel read or wrote memory outside its buffers. The line named may be a later one.",
        "A bug in a kernel (of an extension, of attention, of NCCL), sizes beyond 32-bit indices, or broken hardware.",
        "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer shows the kernel; another release of it; nvidia-smi -q for ECC"
        " errors.",
        "The engine has no kernels of its own; --attn eager without --compile avoids most others.",
        (
            "axolotl-ai-cloud/axolotl#1473",
            "vllm-project/vllm#4108",
            "pytorch/pytorch#152780",
            "microsoft/TRELLIS.2#90",
        ),
    ),
    Known(
        "no code for this GPU",
        "all, on CUDA",
        (r"no kernel image is available for execution", r"cuda capability sm_\d+ is not compatible"),
        "torch, or an extension, was built without code for this kind of GPU.",
        "The GPU is newer than the release, or older than what it still supports; an extension was built elsewhere.",
        "A build for the CUDA version that the GPU needs; TORCH_CUDA_ARCH_LIST when building an extension.",
        "The same: it is torch's build. The engine compiles nothing.",
        ("MIC-DKFZ/nnUNet#1040", "pytorch/pytorch#54053", "thuml/Time-Series-Library#611"),
    ),
    Known(
        "torch cannot use the GPU",
        "all, on CUDA",
        (
            r"nvidia driver on your system is too old",
            r"torch not compiled with cuda enabled",
            r"cuda driver version is insufficient",
        ),
        "The installed torch does not match the driver, or is a CPU build.",
        "A package has replaced torch with another build; or the driver is older than torch's CUDA.",
        "pip install torch from the index of the driver's CUDA version (nvidia-smi shows it); a newer driver.",
        "`shardproof doctor` and `shardproof env` show which devices torch sees.",
        ("pytorch/pytorch#25581", "pytorch/pytorch#4546", "ai4d-iasc/trixie#9"),
    ),
    Known(
        "an extension for another torch",
        "all, with FlashAttention",
        (r"(flash_attn|xformers|apex|_cuda)[\w.-]*\.so: undefined symbol",),
        "A compiled package was built against a different release of torch from the installed one.",
        "torch was upgraded after it, or its wheel is for another torch, CUDA or C++ ABI.",
        "Install it again with --no-build-isolation, or the wheel whose name has torch's version in it.",
        "No such package is needed: without --attn a model uses torch's own attention.",
        (
            "Dao-AILab/flash-attention#966",
            "Dao-AILab/flash-attention#784",
            "Dao-AILab/flash-attention#928",
            "Dao-AILab/flash-attention#1832",
        ),
    ),
    Known(
        "no CUDA toolkit",
        "DeepSpeed",
        (r"CUDA_HOME does not exist", r"CUDA_HOME environment variable is not set", r"MissingCUDAException"),
        "Something needs to compile for CUDA, but there is no compiler.",
        "torch brings CUDA's libraries, not its toolkit (nvcc); DeepSpeed looks for it when it is imported, and other"
        " libraries import DeepSpeed where it is installed.",
        "Install the toolkit of torch's CUDA version and set CUDA_HOME, or remove DeepSpeed where it is not needed.",
        "Nothing is compiled to start.",
        (
            "deepspeedai/DeepSpeed#2772",
            "deepspeedai/DeepSpeed#2337",
            "jingyaogong/minimind#48",
            "hiyouga/LlamaFactory#9270",
        ),
    ),
    Known(
        "two versions of CUDA",
        "DeepSpeed, and whatever else compiles",
        (
            r"CUDAMismatchException",
            # With other words after it, DeepSpeed accepts the two versions.
            r"installed cuda version \S+ does not match the version torch was compiled with \S+ unable to compile",
            r"the detected cuda version \(\S+\) mismatches the version that was used to compile pytorch",
        ),
        "Something needs to compile for CUDA, but the compiler's CUDA version differs from torch's.",
        "DeepSpeed builds its operations when they are first used (cpu_adam with offload, fused_adam), with the nvcc of"
        " CUDA_HOME or PATH: the system's, or that of another environment. torch brings its own CUDA.",
        "A toolkit of torch's version (torch.version.cuda), with CUDA_HOME set to it; or torch for the installed"
        " toolkit. DS_SKIP_CUDA_CHECK=1 where the two are known to be compatible.",
        "Nothing is compiled at start-up: optimizers are torch's, with offload too.",
        (
            "deepspeedai/DeepSpeed#3223",
            "deepspeedai/DeepSpeed#2902",
            "deepspeedai/DeepSpeed-MII#277",
            "deepspeedai/DeepSpeedExamples#370",
        ),
    ),
    Known(
        "bf16 on a GPU that has none",
        "transformers",
        (r"your setup doesn't support bf16", r"bfloat16 is only supported on gpus with compute capability"),
        "bf16 was requested, but the GPU cannot compute in it, or no GPU was found.",
        "GPUs before Ampere (V100, T4, 20xx) have fp16 only; a torch without CUDA says the same.",
        "fp16 instead, also in the DeepSpeed file.",
        "--precision fp16 scales the loss; --precision fp32 works everywhere.",
        (
            "tatsu-lab/stanford_alpaca#133",
            "databrickslabs/dolly#11",
            "OptimalScale/LMFlow#88",
            "lm-sys/FastChat#399",
        ),
    ),
    Known(
        "the hub cannot be reached",
        "transformers, datasets",
        (
            r"LocalEntryNotFoundError",
            r"we couldn't connect to '?https?://",
            r"OfflineModeIsEnabled",
            r"(max retries exceeded|timed out|connection (error|aborted|refused))[^\n]{0,200}huggingface\.co",
            r"huggingface\.co[^\n]{0,200}(max retries exceeded|timed out|connection (error|aborted|refused))",
        ),
        "A file of a model or a data set is not on this machine, and the hub did not answer.",
        "Cluster nodes often have no internet access; or a proxy or firewall is in the way, or the hub is busy.",
        "Fetch it where there is a network (hf download) and name the folder; HF_HUB_OFFLINE=1; HF_ENDPOINT for a"
        " mirror.",
        "--model FOLDER and files as --dataset need no network.",
        (
            "huggingface/huggingface_hub#2319",
            "Stability-AI/generative-models#222",
            "alvinliu0/HumanGaussian#4",
            "Stability-AI/stablediffusion#412",
        ),
    ),
    Known(
        "no access on the hub",
        "transformers, datasets",
        (r"cannot access gated repo", r"GatedRepoError", r"401 Client Error[^\n]*huggingface\.co"),
        "The model is private or its terms must be accepted first, or its name is wrong.",
        "There is no token, or it belongs to another account or may not read gated models.",
        "Accept the terms on the model's page; hf auth login, or HF_TOKEN, of that account.",
        "The same. --model FOLDER needs no network.",
        (
            "huggingface/huggingface_hub#2586",
            "01-ai/Yi#226",
            "Tencent/MimicMotion#88",
            "lemonade-sdk/lemonade#58",
        ),
    ),
)
