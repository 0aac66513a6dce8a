"""A frozen base in four bits under adapters (QLoRA, arXiv 2305.14314), whose packed weights are sharded like others.

bitsandbytes packs and unpacks. Its own layer keeps the packed weight from forward to backward where autograd does not
see it, so every gathered unit would stay gathered; here it is saved like any tensor, and gathered again when backward
needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from shardproof.zero.build import READER, find_units
from shardproof.zero.device import default_device

BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share one
_BUFFERS = ("scales", "scales_of_scales", "steps", "offset")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class FourBitLinear(nn.Linear):
    """A frozen linear layer. Each byte holds two weights, and scales take eight bits each.

    Attributes:
        weight: [weights / 2, 1], uint8.
        scales: [weights / 64], uint8, or float32 if they are not packed themselves.
        scales_of_scales: [weights / 64 / 256], float32; `steps`: [256], the values that packed scales stand for;
            `offset`: their mean. None if scales are not packed. These are not sharded: together they take a 32nd of the
            weight.
        source: returns the full weight, until it is packed.
    """

    kind: str
    whole_shape: torch.Size
    block: int
    scales: torch.Tensor
    scales_of_scales: torch.Tensor | None
    steps: torch.Tensor
    offset: torch.Tensor
    source: Callable[[], torch.Tensor] | None

    def become(self, kind: str, shape: torch.Size, packed: torch.Tensor, block: int = BLOCK) -> None:
        """Finish the initialisation of a layer that had another class."""
        self.kind, self.whole_shape, self.block, self.source = kind, shape, block, None
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def pack(self) -> torch.Tensor:
        """The full weight, packed: [weights / 2, 1]. Sets the scales."""
        from bitsandbytes.functional import quantize_4bit

        read = cast("Callable[[], torch.Tensor]", self.source)
        value = read().to(default_device())
        value = value if value.dtype in _FLOATS else value.float()
        packed, state = quantize_4bit(value, blocksize=BLOCK, compress_statistics=True, quant_type=self.kind)
        self.take(state)
        self.source = None
        return packed

    def take(self, state: Any) -> None:
        """Set the scales from bitsandbytes' `QuantState`."""
        self.scales = state.absmax
        if state.nested:
            self.scales_of_scales, self.steps, self.offset = state.state2.absmax, state.state2.code, state.offset

    def read(self, first: int, last: int) -> torch.Tensor:
        """A range of the packed bytes, for the engine, which shards them."""
        return self.pack().view(-1)[first:last]

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [out, in] in `dtype`, from its packed bytes."""
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        if self.source is not None:  # this rank has no part of the weight, so it was never read
            self.pack()
        scales = self.scales
        if self.scales_of_scales is not None:
            numbers = {"absmax": self.scales_of_scales, "code": self.steps, "blocksize": SCALES}
            scales = dequantize_blockwise(scales, **numbers) + self.offset
        state = QuantState(scales, self.whole_shape, blocksize=self.block, quant_type=self.kind, dtype=dtype)
        return whole(packed, state)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = _Product.apply(input, self.weight, self)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


def whole(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """Unpack a weight that bitsandbytes has packed. Its blocks continue from one row to the next, but its kernels for
    CPUs with AVX-512 (0.50) start a block in each row: so they get a shape whose rows are blocks."""
    from bitsandbytes.functional import dequantize_4bit

    shape, flat = torch.Size(state.shape), copy.copy(state)
    blocks, rest = divmod(shape.numel(), state.blocksize)
    flat.shape = torch.Size((1, shape.numel()) if rest else (blocks, state.blocksize))
    return cast("torch.Tensor", dequantize_4bit(packed, flat)).reshape(shape)


class _Product(torch.autograd.Function):
    """`input @ weight.T` for a packed weight, which is unpacked in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, packed: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.layer = layer
        return F.linear(input, layer.unpack(packed, input.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grads[0] @ ctx.layer.unpack(packed, grads[0].dtype), None, None


def in_four_bits(model: nn.Module, kind: str, packs: Callable[[str], bool]) -> int:
    """Make the linear layers in the blocks of a model keep their weights in four bits, before it gets adapters and is
    sharded. If the model was loaded without values, each rank packs one weight at a time and keeps its part.

    Args:
        kind: `nf4` or `fp4`.
        packs: whether to pack the weight with a name.

    Returns: the number of packed layers.
    """
    blocks = tuple(f"{name}." for name, _ in find_units(model, None))
    found = [m for n, m in model.named_modules() if n.startswith(blocks) and type(m) is nn.Linear]
    names = {id(p): n for n, p in model.named_parameters()}
    found = [module for module in found if packs(names[id(module.weight)])]
    for module in found:
        _convert(module, kind)
    return len(found)


def _convert(module: nn.Linear, kind: str) -> None:
    weight = module.weight
    shape, count = weight.shape, weight.numel()
    read = weight.__dict__.get(READER)
    module.__class__ = FourBitLinear
    layer: Any = module
    nothing = torch.empty((), dtype=torch.uint8, device=weight.device).expand(-(-count // 2), 1)
    layer.become(kind, shape, nothing)
    if read is not None:
        layer.source = lambda: read(0, count).view(shape)
        setattr(layer.weight, READER, layer.read)
    elif weight.is_meta:
        blocks = -(-count // BLOCK)
        sizes = {"scales": (blocks, torch.uint8), "scales_of_scales": (-(-blocks // SCALES), torch.float32)}
        for name, (size, dtype) in {**sizes, "steps": (256, torch.float32)}.items():
            setattr(layer, name, torch.empty(size, dtype=dtype, device="meta"))
        layer.offset = torch.empty((), device="meta")
    else:
        layer.source = weight.detach
        layer.weight = nn.Parameter(layer.pack(), requires_grad=False)


def count_weights(model: nn.Module) -> tuple[int, int]:
    """The number of weights of a model, and of trained ones; a packed weight counts as the weights it stands for."""
    packed = [m for m in model.modules() if isinstance(m, FourBitLinear)]
    every = sum(p.numel() for p in model.parameters()) + sum(m.whole_shape.numel() - m.weight.numel() for m in packed)
    return every, sum(p.numel() for p in model.parameters() if p.requires_grad)


def packed_kind(config: Any) -> Literal["nf4", "fp4"] | None:
    """`nf4` or `fp4` if the config of a transformers model says that its weights are in bitsandbytes' 4-bit format."""
    found = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    return found.get("bnb_4bit_quant_type", "fp4") if found.get("load_in_4bit") else None


def adopt(model: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Convert the bitsandbytes layers of a model that transformers has loaded in four bits, before it gets adapters;
    cast the rest to `dtype`, which transformers ignores. Returns whether there are any such layers."""
    found = [m for m in model.modules() if type(m).__name__ == "Linear4bit" and type(m).__module__.startswith("bitsan")]
    for module in found:
        weight: Any = module.weight
        state = weight.quant_state
        module.__class__ = FourBitLinear
        layer: Any = module
        layer.become(state.quant_type, state.shape, weight.data, state.blocksize)
        layer.take(state)
    for p in model.parameters() if found and dtype is not None else ():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    return bool(found)


def unpacked(model: Any, dtype: torch.dtype) -> Any:
    """Turn a model that transformers has loaded in four bits into an ordinary one; return any other unchanged."""
    adopt(model, dtype)
    found = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    if not found:
        return model
    for layer in found:
        weight = layer.unpack(layer.weight, dtype)
        for name in _BUFFERS:
            del layer._buffers[name]
        plain: Any = layer
        plain.__class__, plain.weight = nn.Linear, nn.Parameter(weight)
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = model._weight_conversions = None  # transformers would revert the conversion when saving
    model.is_quantized = model.is_loaded_in_4bit = False
    return model
