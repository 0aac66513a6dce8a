"""The only file that knows accelerators: which device a rank works on, what it holds, where buffers come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.errors import DeviceError

# Which of the processes on its machine a rank is, in torchrun's word and in those of Slurm and of MPI.
LOCAL_RANK = "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"


def default_device() -> torch.device:
    """The accelerator of this rank, or the CPU where there is none: by its rank on the node, unless another than the
    first one was chosen before.

    Raises:
        DeviceError: torchrun has started more processes than there are accelerators. They share them all the same in a
            process group of gloo that is there already; NCCL and its like refuse.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build may find no GPU
    if accelerator is None:
        return torch.device("cpu")
    here = next((os.environ[name] for name in LOCAL_RANK if os.environ.get(name)), None)
    if here is not None and torch.accelerator.current_device_index() == 0:
        count = torch.accelerator.device_count()
        if int(here) >= count:
            _check_shared(count)
        # Of those it may see: some launchers (srun --gpus-per-task=1) show each process its own alone.
        torch.accelerator.set_device_index(int(here) % count)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check_shared(count: int) -> None:
    """torchrun shows all processes of a machine the same devices."""
    if not dist.is_torchelastic_launched() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return
    started = os.environ.get("LOCAL_WORLD_SIZE", "more")
    raise DeviceError(
        f"{started} processes were started on a machine that shows them {count} accelerator(s), and two cannot share"
        f" one.\nStart {count} there (--nproc, --nproc-per-node), or show them more (CUDA_VISIBLE_DEVICES). In a"
        " process group of gloo that your program has made, they share."
    )


def has_bf16() -> bool:
    """Whether this process has an accelerator that computes in bfloat16 by itself; some only emulate it. It may take
    memory there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    supported = accelerator and getattr(getattr(torch, accelerator.type, None), "is_bf16_supported", None)
    if not supported:
        return False
    try:
        return bool(supported(including_emulation=False))
    except TypeError:  # not every accelerator emulates
        return bool(supported())


def widest_float(device: torch.device) -> torch.dtype:
    """In what sums over ranks are made there: float64, or float32 on a device that has no such (MPS)."""
    try:
        return torch.empty((), dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


@contextmanager
def side_stream(device: torch.device, stream: torch.Stream | None = None) -> Iterator[torch.Stream]:
    """Operations inside run on a stream of their own (`stream`, or a new one), after those queued before."""
    stream = torch.Stream(device) if stream is None else stream
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream


def free_memory(device: torch.device, ranks: int) -> int:
    """Bytes that a rank may still take on `device`; on the CPU its part of what the ranks share, 0 if unknown."""
    if device.type != "cpu":
        # What torch's allocator holds for later is taken, to the driver.
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(getattr(torch, device.type).mem_get_info(device)[0]) + kept
    return host_memory() // ranks


def host_memory() -> int:
    """Bytes that may still be taken on this machine, within the limits of the control groups that this process is in,
    as in a container or a job of Slurm's; 0 if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            left = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return min([left, *_left_in_groups()])
    except (OSError, StopIteration):
        return 0


def _left_in_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group around this process has left of its memory. Files that are read count as taken there, and
    give way."""
    for line in proc.read_text().splitlines() if proc.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # of the second version
            top, limit, taken = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, taken = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = top / path.strip("/")
        around = [inside, *inside.parents][: 1 + len(inside.parts) - len(top.parts)]
        for group in around:  # a container may see the last of them only
            with suppress(OSError, ValueError):  # there is none, or "max"
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                own = stat.get("inactive_file", 0)
                cache = int(stat.get("total_inactive_file", own))  # of groups inside it, too
                yield max(most - int((group / taken).read_text()) + cache, 0)


def peak_memory(held: int | None = None) -> int:
    """Bytes: the most that tensors took on the accelerator, or the process where there is none. Who has just asked for
    `held_memory` may say what it was."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    return max(_peak_of_process(), held_memory() if held is None else held)  # Linux brings the peak up to date late


def held_memory() -> int:
    """Bytes now: of tensors on the accelerator, or resident of the process where there is none."""
    if torch.accelerator.is_available():
        return torch.accelerator.memory_allocated()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return _peak_of_process()


def _peak_of_process() -> int:
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def imagined(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the only one of the group: torch's "fake" backend moves nothing. All others are then
    taken to do what this one does, without a word. `shardproof plan` runs the engine so, on the meta device."""
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def address_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of `tensor`: its address, or its storage if it has none (meta)."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Reference count of a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


class BufferPool:
    """Flat buffers that are reused as soon as nobody else refers to their memory.

    On the CPU a fresh allocation of a gathered unit costs more than the collective that fills it: the
    kernel hands out and zeroes its pages one by one (12 MB: 8.5 ms fresh, 0.3 ms reused). A buffer is
    free when the pool holds the only reference to its storage, so a view that somebody kept can never be
    written over. Accelerators have a caching allocator of their own: there the pool only allocates.

    Args:
        allocate: returns a tensor of a given number of bytes, if other memory than the device's own is to be used.

    Attributes:
        keeps: whether buffers are kept for reuse.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.device, self.keeps = device, device.type == "cpu"
        self._allocate = allocate or partial(torch.empty, dtype=torch.uint8, device=device)
        self._storages: dict[int, list[torch.UntypedStorage]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor, never an inference tensor (it would poison a later backward)."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.take(numel, dtype)
        if not self.keeps:
            return torch.empty(numel, dtype=dtype, device=self.device)
        size = numel * dtype.itemsize
        kept = self._storages.setdefault(size, [])
        for storage in kept:
            if storage_uses(storage) == 1:
                break
        else:
            storage = self._allocate(size).untyped_storage()
            kept.append(storage)
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (numel,), (1,))

    def forget(self) -> None:
        """Free unused buffers; the others are freed with their users."""
        self._storages.clear()
