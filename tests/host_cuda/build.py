"""Build a torch.cuda that is this machine's memory and processor: python tests/host_cuda/build.py FOLDER

With PYTHONPATH=FOLDER, a build of torch without CUDA has four GPUs (HOST_CUDA_DEVICES=N: so many): tensors of theirs
cannot be mixed with the host's, autograd has a thread for each, random numbers are their own, NCCL is there, and
everything above (transformers, Accelerate, TRL, our commands) takes the ways that it takes on a GPU. Numbers are those
of the host's kernels. What it cannot show is what a queue shows: a kernel has run when it is queued. No Triton, no
profiler of CUDA, no sparse tensors, no LSTM. Needs a C++ compiler; takes a minute. `make test-host-cuda` does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent

# Torch asks once whether there is CUDA: what answers has to be there before torch is.
SITE = """import ctypes, importlib.util, os
found = importlib.util.find_spec("torch")
if found and found.origin:
    first = os.path.join(os.path.dirname(found.origin), "lib", "libtorch_global_deps.so")
    for file in (first, os.path.join(os.path.dirname(__file__), "libhost_cuda.so")):
        ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
"""


def build(folder: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    folder.mkdir(parents=True, exist_ok=True)
    lib = Path(torch.__file__).parent / "lib"
    include = [f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]]
    shared = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", "-O1", "-w", *include]
    links = [f"-L{lib}", f"-L{folder}", f"-Wl,-rpath,{lib}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    core = [*shared, str(HERE / "core.cpp"), *links, "-ltorch_cpu", "-lc10"]
    bindings = [*shared, "-DTORCH_EXTENSION_NAME=_host_cuda", str(HERE / "bindings.cpp"), *links, "-lhost_cuda"]
    subprocess.run([*core, "-o", str(folder / "libhost_cuda.so")], check=True)
    subprocess.run(
        [*bindings, "-ltorch_python", "-ltorch_cpu", "-lc10", "-o", str(folder / "_host_cuda.so")], check=True
    )
    shutil.copy(HERE / "host_cuda.py", folder)
    (folder / "sitecustomize.py").write_text(SITE)
    told = folder / "host_cuda-0.0.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: host-cuda\nVersion: 0.0\n")
    (told / "entry_points.txt").write_text("[torch.backends]\nhost_cuda = host_cuda:load\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
