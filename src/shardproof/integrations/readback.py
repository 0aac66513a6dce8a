"""Check that saved weights read back equal: those on disk are compared with those in memory, before anybody needs
them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from shardproof.errors import CheckpointError


def check_saved(folder: str | Path, weights: Mapping[str, torch.Tensor], ignored: Collection[str] = ()) -> None:
    """Read the safetensors files in `folder`, one tensor at a time, and compare them with `weights`.

    A tensor that shares its memory with another one in the files (tied weights) may be missing, and so may those
    `ignored`. If `save_pretrained` has renamed tensors for the files, tensors that cannot be found under their names
    are not compared.

    Raises:
        CheckpointError: a tensor is missing, unreadable or different; the message names the first five.
    """
    from safetensors import SafetensorError, safe_open

    missing = {name for name in weights if name not in ignored}
    found: set[int] = set()
    wrong: list[str] = []
    renamed = False
    files = sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118  (not a dict)
                    wanted = weights.get(name)
                    if wanted is None:
                        renamed = True
                        continue
                    missing.discard(name)
                    found.add(wanted.data_ptr())
                    saved = content.get_tensor(name)
                    if saved.shape != wanted.shape or not _same(saved, wanted.detach().cpu().to(saved.dtype)):
                        wrong.append(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} was written, but cannot be read back: {error}.") from error
    if not renamed:
        wrong += [f"{name} (missing)" for name in sorted(missing) if weights[name].data_ptr() not in found]
    if files and wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"The files saved in {folder} differ from the weights in memory: {', '.join(wrong[:5])}{more}. Do not use "
            "these files; check the disk, and the model's save_pretrained if it has its own."
        )


def _same(saved: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit: a NaN equals itself."""
    first, second = (t.contiguous().view(-1).view(torch.uint8) for t in (saved, wanted))
    return torch.equal(first, second)
