"""Promise: an error is known in the form in which people have it: with the prefixes of launchers, times, colours, boxes
and broken lines around it, beside lines that mean nothing, and of several errors the cause comes first."""

from __future__ import annotations

import pytest

from shardproof.doctor.explain import explain

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/opt/conda/lib/python3.11/site-packages/transformers/trainer.py", line 2245, in train\n'
    "    return inner_training_loop(\n"
    "           ^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _wrapped_call_impl\n'
    "    return self._call_impl(*args, **kwargs)\n"
)
PREFETCH = (
    "Traceback (most recent call last):\n"
    '  File "/opt/conda/lib/python3.11/site-packages/deepspeed/runtime/zero/parameter_offload.py", line 228, in'
    " _start_of_forward_hook\n"
    "    self.get_param_coordinator().reset_step()\n"
    '  File "/opt/conda/lib/python3.11/site-packages/deepspeed/runtime/zero/partitioned_param_coordinator.py", line'
    " 208, in record_parameters\n"
    "    step_id = self.__step_id_module_fetched_for[sub_module.id].popleft()\n"
    "              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    "IndexError: pop from an empty deque\n"
)
SUMMARY = (
    "E1003 09:15:02.113000 4021 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)"
    " local_rank: 1 (pid: 4077) of binary: /opt/conda/bin/python\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "============================================================\n"
    "train.py FAILED\n"
    "Root Cause (first observed failure):\n"
    "[0]:\n"
    "  exitcode  : 1 (pid: 4077)\n"
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
)


def ranked(text: str, rank: int = 1) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


# What the last line of a traceback says, and which failure it is.
ENDS = {
    "ValueError: Image features and image tokens do not match: tokens: 1368, features 1369": "files and their marks",
    "ValueError: Mismatch in `image` token count between text and `input_ids`. Got ids=[1024] and text=[2204].": (
        "files and their marks"
    ),
    "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template "
    "argument was passed!": "no chat template",
    "RuntimeError: expected scalar type Float but found BFloat16": "two dtypes in one operation",
    "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float": "two dtypes in one operation",
    "ValueError: The checkpoint you are trying to load has model type `qwen3_omni_moe` but Transformers does not "
    "recognize this architecture.": "a model that is newer than transformers",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
    "'spawn' start method": "CUDA in a forked process",
    "OSError: [Errno 28] No space left on device": "a full disk",
    "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 5376 vs 5264": "a full disk",
    "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)": (
        "a full disk"
    ),
    "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch for base_model.model."
    "lm_head.weight: copying a param with shape torch.Size([32001, 4096]) from checkpoint, the shape in current model "
    "is torch.Size([32000, 4096]).": "weights of another shape",
    "RuntimeError: FlashAttention only support fp16 and bf16 data type": "FlashAttention in fp32",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": (
        "cuBLAS could not begin"
    ),
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "no code for this GPU",
    "ImportError: /opt/conda/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined "
    "symbol: _ZN3c104cuda9SetDeviceEi": "an extension for another torch",
    "TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'tokenizer'": "an argument that was renamed",
    "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeader": "a file that holds no weights",
    "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top": (
        "a quantised model without adapters"
    ),
    "RuntimeError: DataLoader worker (pid 19597) is killed by signal: Killed.": "a worker of the data loader is gone",
    "RuntimeError: DataLoader worker (pid(s) 2218, 2219) exited unexpectedly": "a worker of the data loader is gone",
    "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-66;7)\n\nCannot access gated repo "
    "for url https://huggingface.co/org/model/resolve/main/config.json.": "no access on the hub",
    "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and "
    "we cannot find the requested files in the local cache.": "the hub cannot be reached",
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached "
    "files.": "the hub cannot be reached",
    "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3": (
        "a tokenizer that is newer than tokenizers"
    ),
    "AssertionError: No inf checks were recorded for this optimizer.": "no gradient under a loss scale",
    "ValueError: The global train batch size (7 x 1) must be evenly divisible by the number of generations per prompt "
    "(8).": "answers that do not divide the batch",
    "ValueError: generation_batch_size (6) must be divisible by num_generations (8).": (
        "answers that do not divide the batch"
    ),
    "ValueError: The model did not return a loss from the inputs, only the following keys: logits. For reference, the "
    "inputs it received are input_ids,attention_mask.": "no loss",
    "ValueError: Unable to create tensor, you should probably activate truncation and/or padding with 'padding=True' "
    "'truncation=True' to have batched tensors with the same length.": "rows of different lengths in a batch",
    "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)": (
        "no CUDA toolkit"
    ),
    "RuntimeError: CUDA error: an illegal memory access was encountered": "illegal memory access",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "torch cannot use the GPU",
    "AssertionError: Torch not compiled with CUDA enabled": "torch cannot use the GPU",
    "ValueError: Your setup doesn't support bf16/gpu.": "bf16 on a GPU that has none",
    "RuntimeError: received 0 items of ancdata": "too many open files",
    "OSError: [Errno 24] Too many open files": "too many open files",
    "RuntimeError: CUDA error: out of memory": "out of memory",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:269, unhandled "
    "cuda error, NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
    "2 'out of memory'": "out of memory",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:33146": (
        "another rank is gone"
    ),
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.": (
        "no process group"
    ),
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 2920830 got signal: 1": (
        "the terminal was closed"
    ),
    "ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a `device_map`.": (
        "a device_map under ZeRO-3"
    ),
    "ValueError: DeepSpeed Zero-3 is not compatible with passing a `device_map`.": "a device_map under ZeRO-3",
    "    assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()\nAssertionError: {'id': 291, "
    "'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 4194304, 'shape': (0,), 'ds_shape': (4096, 1024), "
    "'requires_grad': True, 'grad_shape': None, 'persist': False, 'active_sub_modules': {7}, "
    "'ds_tensor.shape': torch.Size([524288])}": ("a parameter that was not gathered"),
    "    assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()\nAssertionError: {'id': 853, "
    "'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0, 'shape': (0,), 'ds_shape': (0,), 'requires_grad': True, "
    "'grad_shape': None, 'persist': True, 'active_sub_modules': {7}, 'ds_tensor.shape': torch.Size([0])}": (
        "a copy of a partitioned module"
    ),
    "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.2 does "
    "not match the version torch was compiled with 11.7, unable to compile cuda/cpp extensions without a matching cuda "
    "version.": "two versions of CUDA",
    "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.1). "
    "Please make sure to use the same CUDA versions.": "two versions of CUDA",
    "AttributeError: 'DummyOptim' object has no attribute 'step'": "a stand-in in place of the optimizer",
    "RuntimeError: Expected all tensors to be on the same device, but got index is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA__index_select)": "tensors on two devices",
}


@pytest.mark.parametrize(("end", "name"), ENDS.items(), ids=ENDS)
def test_the_last_line_of_a_traceback_of_a_rank_is_known(end, name):
    log = ranked(TRACEBACK + end) + SUMMARY
    found = explain(log)
    assert found[0].known.name == name
    assert [match.known.name for match in found[1:]] in ([], ["a summary of the launcher"])


DRESSES = {
    "bare": lambda text: text,
    "ranks": lambda text: ranked(text, 7),
    "times": lambda text: "".join(f"2025-10-03 09:15:02,113 ERROR {line}\n" for line in text.splitlines()),
    "srun -l": lambda text: "".join(f"3: [rank3]: {line}\n" for line in text.splitlines()),
    "mpirun": lambda text: "".join(f"[1,3]<stderr>:{line}\n" for line in text.splitlines()),
    "ray": lambda text: "".join(f"(RayTrainWorker pid=913, ip=10.0.0.4) {line}\n" for line in text.splitlines()),
    "carriage returns": lambda text: " 12%|###  | 3/25 [00:07<00:51]\r" + text.replace("\n", "\r\n"),
    "colours": lambda text: text.replace("Error", "\x1b[1;31mError\x1b[0m").replace(" and ", " \x1b[36mand\x1b[0m "),
}
WRAPPED = """\
╭───────────────── Traceback (most recent call last) ──────────────────╮
│ /opt/conda/lib/python3.11/site-packages/trl/trainer/utils.py:88 in f │
│ ❱ 88 │   return self.model(**inputs)                                 │
╰──────────────────────────────────────────────────────────────────────╯
RuntimeError: Expected to have finished reduction in the prior
iteration before starting a new one. This error indicates that your module has
parameters that were not used in producing loss.
"""


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (WRAPPED, "unused parameters"),
        (TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.", "out of memory"),
        (
            "ValueError: Target modules {'c_attn'} not found in\nthe base model. Please check the target modules and"
            " try again.",
            "adapters without a place",
        ),
    ],
    ids=["wrapped", "memory", "adapters"],
)
def test_an_error_is_known_however_it_is_dressed(dress, text, name):
    found = explain(DRESSES[dress](text))
    assert [match.known.name for match in found] == [name]
    assert not set("\x1b\r│\n") & set(found[0].line)


def test_the_cause_comes_before_its_echoes():
    """One rank ran out of memory; the others tell that it is gone, and so does the launcher."""
    others = ranked(
        TRACEBACK
        + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited "
        "or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network "
        "error or a remote process exiting prematurely.",
        0,
    )
    waiting = (
        "[rank2]:[E1003 09:15:01.98 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=94, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600029 ms before timing out.\n"
    )
    killed = SUMMARY.replace("exitcode: 1", "exitcode: -9")
    memory = ranked(TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB.", 3)
    for text in (others + waiting + memory + killed, memory + killed + others + waiting):
        assert explain(text)[0].known.name == "out of memory"


def test_of_several_causes_the_first_in_the_text_comes_first():
    early = TRACEBACK + "RuntimeError: expected scalar type Half but found Float\n"
    late = PREFETCH
    assert [m.known.name for m in explain(early + late)] == ["two dtypes in one operation", "stale prefetch"]
    assert [m.known.name for m in explain(late + early)] == ["stale prefetch", "two dtypes in one operation"]


def test_the_summary_of_the_launcher_comes_after_what_it_lists():
    """A rank that was killed leaves no other text than the launcher's."""
    killed = SUMMARY.replace("exitcode: 1", "exitcode: -9").replace("exitcode  : 1", "exitcode  : -9")
    for log in (killed, killed.partition("\n")[2]):  # with and without the line that the launcher logs before it
        assert [m.known.name for m in explain(log)] == ["a process was killed", "a summary of the launcher"]


# Nothing is known of these, or nothing is wrong at all.
OTHERS = [
    "Installed CUDA version 12.2 does not match the version torch was compiled with 12.4 but since the APIs are "
    "compatible, accepting this combination",
    "{'loss': 0.1474, 'grad_norm': nan, 'learning_rate': 0.0001, 'epoch': 0.04}",  # a step that a loss scale leaves out
    "{'loss': 0.0, 'grad_norm': 0.013, 'learning_rate': 1e-06, 'reward': 0.4}",  # GRPO
    "{'loss': 0.0, 'grad_norm': 0.1}\n{'loss': 0.4, 'grad_norm': nan}",
    "Loading extension module cpu_adam...\nTime to load cpu_adam op: 2.31 seconds",
    "requests.exceptions.ConnectionError: ('Aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    "psycopg2.errors.OutOfMemory: out of shared memory\nHINT:  You might need to increase max_locks_per_transaction.",
    "KeyError: 'messages'",
    "ModuleNotFoundError: No module named 'my_package'",
    "TypeError: forward() got an unexpected keyword argument 'colour'",
    "ValueError: invalid literal for int() with base 10: 'seven'",
    "{'loss': 0.4113, 'grad_norm': 1.2, 'learning_rate': 9.8e-06, 'epoch': 0.05}",
    "Setting `use_cache=False` because gradient checkpointing is on.",
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "NCCL version 2.21.5+cuda12.4\nnode1:4021:4021 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>",
    "fatal: unable to access 'https://example.org/repo.git/': Connection reset by peer",
    "The shape of the picture is [0], the exit code 9, the memory 80 GB",
    "FileNotFoundError: [Errno 2] No such file or directory: 'train.jsonl'",
    "the run used 3 devices, all ranks on the same device class; out of 40 memory banks none failed",
]


@pytest.mark.parametrize("text", OTHERS)
def test_of_other_texts_nothing_is_said(text):
    assert explain(text) == []
    assert explain(ranked(text)) == []


def test_a_harmless_line_is_told_as_what_it_is_and_last():
    line = "Invalidate trace cache @ step 1 and module 5: cache has only 5 modules\n"
    (alone,) = explain(line)
    assert "harmless" in alone.known.means
    first, last = explain(line + TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory.")
    assert (first.known.name, last.known) == ("out of memory", alone.known)


def test_only_a_few_are_shown_in_full(capsys):
    from shardproof.cli.main import main

    text = "\n".join(ENDS)
    assert main(["explain", text]) == 0
    out = capsys.readouterr().out
    assert out.count("means:") == 3
    assert "also matched:" in out
