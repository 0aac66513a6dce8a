"""Models whose files hold packed weights (FP8, MXFP4): they are trained unpacked.

[Note: unpacked while they are read]
Several models are published in eight or four bits alone (gpt-oss, DeepSeek-V3, the FP8 files of Qwen3). Where an
accelerator can compute with such weights, transformers keeps them packed: they have no gradient then, and to mixed
precision they are values like others, without the scales that their layers multiply them by. It can also unpack them
as it reads them. Then the model is an ordinary one, which can be cut, trained, packed anew (--quantize nf4) and saved.
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
    """Raise ConfigError for weights that are packed as transformers does not know: it would load codes as values, and
    leave out their scales. Returns what their config says of packing, if anything."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    packed: Any = said_by(source, "config.json").get("quantization_config")
    if not isinstance(packed, dict) or packed.get("load_in_8bit") or packed.get("load_in_4bit"):
        return packed
    if (method := packed.get("quant_method")) not in KINDS:
        raise ConfigError(
            f"The weights of {source} are packed ({method}), which transformers does not know: it would take codes for"
            " values.\nName a model whose weights are not packed, or as fp8, mxfp4 or compressed-tensors."
        )
    return packed


def unpacked_from(source: str) -> str | None:
    """The kind of packing (`fp8`, `mxfp4`) of a model in a folder or on the hub, where transformers can unpack weights
    while it reads them, else None."""
    packed: Any = said_by(source, "config.json").get("quantization_config")
    return str(packed["quant_method"]) if unpacking_of(packed) else None


def unpacking(source: str) -> dict[str, Any]:
    """What `from_pretrained` is to be told of that model so that weights are unpacked.

    Raises:
        ConfigError: see `check_can_unpack`; or they have scales that it does not read.
    """
    packed = check_can_unpack(source)
    found = unpacking_of(packed)
    if found and packed["quant_method"] == "fp8":
        names = files_of(source, local_files_only=True)
        # Of experts in one tensor, as transformers saves those that it computes with.
        apart = (name for name in names if name.endswith("_scale_inv") and not name.endswith("weight_scale_inv"))
        if (scale := next(apart, None)) is not None:
            raise ConfigError(unread(scale.removesuffix("_scale_inv"), str(names[scale])))
    return found


def unread(weight: str, file: str) -> str:
    """What is wrong with a weight whose scales lie beside it."""
    return (
        f"'{weight}' is packed in eight bits in {file}, in a way of which transformers does not read the scales: it"
        " would take codes for values.\nName a model whose weights are not packed so."
    )


def unpacking_of(packed: Any) -> dict[str, Any]:
    """The same by what a config says as `quantization_config`."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS

    kind: Any = KINDS.get(packed.get("quant_method", "")) if isinstance(packed, dict) else None
    if kind is None or "dequantize" not in inspect.signature(kind.__init__).parameters:
        return {}
    if packed["quant_method"] == "fp8":
        _allow_smaller_last_blocks()
    return {"quantization_config": kind.from_dict({**packed, "dequantize": True})}


@functools.cache
def _allow_smaller_last_blocks() -> None:
    """Have transformers unpack weights whose size is no multiple of a block's, as of DeepSeek-V3 (576 rows in blocks of
    128). Its 5.24 takes all blocks to be of one size: it ends in an error, or takes wrong scales without a word."""
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
