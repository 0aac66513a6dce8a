"""Models whose files hold packed weights (FP8, MXFP4): they are trained unpacked.

[Note: unpacked while they are read]
Several models are published in eight or four bits alone (gpt-oss, DeepSeek-V3, the FP8 files of Qwen3). Where an
accelerator can compute with such weights, transformers keeps them packed: they have no gradient then, and to mixed
precision they are values like others, without the scales that their layers multiply them by. It can also unpack them
as it reads them. Then the model is an ordinary one, which can be cut, trained, packed anew (--quantize nf4) and saved.
"""

from __future__ import annotations

import inspect
from typing import Any

from shardproof.models.processors import said_by


def unpacked_from(source: str) -> str | None:
    """The kind of packing (`fp8`, `mxfp4`) of a model in a folder or on the hub, where transformers can unpack weights
    while it reads them, else None."""
    packed = said_by(source, "config.json").get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, dict) else None
    return str(method) if method and "dequantize" in inspect.signature(_kind(method).__init__).parameters else None


def _kind(method: str) -> Any:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    return KINDS.get(method, object)


def unpacking(source: str) -> dict[str, Any]:
    """What `from_pretrained` is to be told of that model so that weights are unpacked."""
    method = unpacked_from(source)
    if method is None:
        return {}
    packed = said_by(source, "config.json")["quantization_config"]
    return {"quantization_config": _kind(method).from_dict({**packed, "dequantize": True})}
