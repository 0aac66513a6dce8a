"""Models whose files hold packed weights (FP8, MXFP4): they are unpacked for training.

[Note: unpacked while reading]
Several models are published only in 8 or 4 bits (gpt-oss, DeepSeek-V3, the FP8 files of Qwen3). If an accelerator can
compute with such weights, transformers keeps them packed: then they have no gradient, and mixed precision would treat
them as ordinary values, without the scales that their layers apply. transformers can also unpack them while reading.
Then the model is an ordinary one, which can be sharded, trained, packed again (--quantize nf4) and saved.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.loading.processors import said_by
from shardproof.models.loading.weight_files import files_of

if TYPE_CHECKING:
    from torch import Tensor


def check_can_unpack(source: str) -> Any:
    """Raise ConfigError for a packing that transformers does not support: it would load codes as values, and leave out
    their scales. Returns the quantization config, if any."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    packed: Any = said_by(source, "config.json").get("quantization_config")
    if not isinstance(packed, dict) or packed.get("load_in_8bit") or packed.get("load_in_4bit"):
        return packed
    if (method := packed.get("quant_method")) not in KINDS:
        raise ConfigError(
            f"The weights of {source} are packed as {method}, which transformers does not support: it would take codes"
            " for values.\nName a model whose weights are not packed, or packed as fp8, mxfp4 or compressed-tensors."
        )
    return packed


def unpacked_from(source: str) -> str | None:
    """The packing (`fp8`, `mxfp4`) of a model in a folder or on the hub, if transformers can unpack it while reading;
    else None."""
    packed: Any = said_by(source, "config.json").get("quantization_config")
    return str(packed["quant_method"]) if unpacking_of(packed) else None


def unpacking(source: str) -> dict[str, Any]:
    """The arguments with which `from_pretrained` unpacks that model's weights.

    Raises:
        ConfigError: see `check_can_unpack`; or the weights have scales that transformers does not read.
    """
    packed = check_can_unpack(source)
    found = unpacking_of(packed)
    if found and packed["quant_method"] == "fp8":
        names = files_of(source, local_files_only=True)
        # For experts in one tensor, as transformers saves packed ones.
        apart = (name for name in names if name.endswith("_scale_inv") and not name.endswith("weight_scale_inv"))
        if (scale := next(apart, None)) is not None:
            raise ConfigError(unread(scale.removesuffix("_scale_inv"), str(names[scale])))
    return found


def unread(weight: str, file: str) -> str:
    """The error text for a weight whose scales are stored as a separate, unread tensor."""
    return (
        f"'{weight}' is packed in 8 bits in {file}, in a way whose scales transformers does not read: it would"
        " take codes for values.\nName a model whose weights are not packed in this way."
    )


def unpacking_of(packed: Any) -> dict[str, Any]:
    """The same, from the `quantization_config` of a config."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    kind: Any = KINDS.get(packed.get("quant_method", "")) if isinstance(packed, dict) else None
    if kind is None or "dequantize" not in inspect.signature(kind.__init__).parameters:
        return {}
    if packed["quant_method"] == "fp8":
        _allow_smaller_last_blocks()
    return {"quantization_config": kind.from_dict({**packed, "dequantize": True})}


@functools.cache
def _allow_smaller_last_blocks() -> None:
    """Make transformers unpack weights whose size is not a multiple of the block size, as in DeepSeek-V3 (576 rows in
    blocks of 128). Version 5.24 assumes blocks of equal size: it raises an error, or silently uses wrong scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    own = Fp8Dequantize._dequantize_one

    def in_whole_blocks(self: Any, codes: Tensor, scales: Tensor, *args: Any, **options: Any) -> Tensor:
        block = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None)
        size, grid = codes.shape[-2:], scales.shape[-2:]
        if not block or len(grid) < 2 or any(-(-n // b) != g for n, b, g in zip(size, block, grid, strict=True)):
            return own(self, codes, scales, *args, **options)
        whole = codes.new_zeros((*codes.shape[:-2], *(b * g for b, g in zip(block, grid, strict=True))))
        whole[..., : size[0], : size[1]] = codes
        return own(self, whole, scales, *args, **options)[..., : size[0], : size[1]]

    Fp8Dequantize._dequantize_one = in_whole_blocks
