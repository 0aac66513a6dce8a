"""torch.cuda of a build of torch without CUDA, on what core.cpp makes of the host. See build.py."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

COUNT = int(os.environ.get("HOST_CUDA_DEVICES", "4"))
TOTAL = 8 << 30


def load() -> None:
    """Called by torch at the end of its import, as the entry point of a device's package."""
    import torch
    import torch.storage

    patch_cuda(torch)
    patch_storages(torch)
    patch_collectives(torch)


def index_of(device: Any = None) -> int:
    import torch

    if isinstance(device, int):
        return device
    device = torch.device("cuda" if device is None else device)
    return torch.accelerator.current_device_index() if device.index is None else device.index


def patch_cuda(torch: Any) -> None:
    import _host_cuda

    cuda, accelerator, inner = torch.cuda, torch.accelerator, torch._C

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **kwargs: Any) -> Any:
            return super().__new__(cls, torch.device("cuda", index_of()), enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        with contextlib.nullcontext() if chosen is None else chosen:
            yield

    def properties(device: Any = None) -> Any:
        sizes = {"total_memory": TOTAL, "multi_processor_count": 2, "L2_cache_size": 50 << 20, "warp_size": 32}
        return types.SimpleNamespace(name="host", major=9, minor=0, uuid=f"GPU-{index_of(device)}", **sizes)

    def of_accelerator(name: str) -> Any:
        return lambda device=None: getattr(accelerator, name)(index_of(device))

    def exchange(device: int) -> int:
        return inner._accelerator_exchangeDevice(device) if device >= 0 else index_of()

    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    told: dict[str, Any] = {
        **{name: of_accelerator(name) for name in (*memory, "reset_peak_memory_stats", "memory_stats")},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: COUNT,
        "current_device": lambda: index_of(),
        "set_device": lambda device: accelerator.set_device_index(index_of(device)),
        "synchronize": lambda device=None: None,
        "current_stream": of_accelerator("current_stream"),
        "set_stream": lambda chosen: accelerator.set_stream(chosen),
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: "host",
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (TOTAL - accelerator.memory_allocated(index_of(device)), TOTAL),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "default_generators": tuple(_host_cuda.generator(index) for index in range(COUNT)),
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
    }
    for name, value in told.items():
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    inner._cuda_isInBadFork = lambda: False
    inner._cuda_emptyCache = lambda: None
    inner._cuda_getCurrentRawStream = lambda device: 0
    inner._cuda_getDevice = lambda: index_of()
    inner._cuda_setDevice = lambda device: accelerator.set_device_index(device)
    inner._cuda_synchronize = lambda: None
    inner._cuda_getCompiledVersion = lambda: 13000
    inner._cuda_getDeviceCount = lambda: COUNT
    torch.version.cuda = "13.0"


def patch_storages(torch: Any) -> None:
    """Storages of a device are made in torch's bindings, which know none here."""
    move, clone = torch.storage._to, torch.storage._StorageBase.clone

    def bytes_of(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        if device.type != "cuda" or self.device == device:
            return move(self, device, non_blocking)
        return bytes_of(self).to(device).untyped_storage()

    def _clone(self: Any) -> Any:
        return bytes_of(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)

    torch.storage._to, torch.storage._StorageBase.clone = _to, _clone


def patch_collectives(torch: Any) -> None:
    """An "nccl" for devices, and a gloo that takes tensors of devices, as that of a build with CUDA."""
    import _host_cuda
    import torch.distributed.distributed_c10d as c10d

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout, self.is_high_priority_stream = c10d.default_pg_timeout, is_high_priority_stream

    class Kind(type):
        def __instancecheck__(cls, other: Any) -> bool:
            return isinstance(other, _host_cuda.Nccl) and other.name() == "nccl"

    class ProcessGroupNCCL(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            return _host_cuda.Nccl(gloo, "nccl")

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    register, limit = torch.distributed.ProcessGroup._register_backend, c10d._get_default_timeout

    def _register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> Any:
        if device.type == "cuda" and isinstance(backend, torch.distributed.ProcessGroupGloo):
            kind, backend = torch.distributed.ProcessGroup.BackendType.CUSTOM, _host_cuda.Nccl(backend, "gloo")
        return register(self, device, kind, backend)

    torch.distributed.ProcessGroup._register_backend = _register_backend
    c10d._get_default_timeout = lambda backend: limit("gloo" if backend == "nccl" else backend)
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    c10d.is_nccl_available = torch.distributed.is_nccl_available = lambda: True
