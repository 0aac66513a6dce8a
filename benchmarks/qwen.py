"""The models of throughput.py: Qwen2.5 shapes with random weights, packed rows, and the operations of a step.

[Note: floating-point operations] Counted for the model, not the machine: recomputation is not included. A trained
matrix takes 6 per element and token, two of them forward (Kaplan et al., arXiv 2001.08361); a frozen one takes 4, since
its own gradient is not needed. A pair of a token and an earlier one in its document takes 12 per element of all heads
in each layer (PaLM, arXiv 2204.02311, appendix B, which counts all pairs; here only the causal half, as in
FlashAttention-2, arXiv 2307.08691). Norms, rotations and the update are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardproof.models.attention.varlen import attention_options
from shardproof.models.checkpointing import enable_checkpointing

LORA_RANK, CLIP = 16, 1.0
PART = 1024  # tokens whose logits exist at once
WARM = 12  # uncounted first steps: the engine compares weights in its first ten


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5 shape; and rows, micro-batches and checkpointing with which training fits into 139 GiB."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    rows: int
    accumulate: int
    checkpointing: bool


SHAPES = {
    "tiny": Shape(512, 64, 160, 3, 4, 2, True, 1, 2, False),
    "0.5b": Shape(151_936, 896, 4864, 24, 14, 2, True, 4, 1, False),
    "3b": Shape(151_936, 2048, 11_008, 36, 16, 2, True, 2, 2, False),
    "7b": Shape(152_064, 3584, 18_944, 28, 28, 4, False, 1, 4, True),
    "14b": Shape(152_064, 5120, 13_824, 48, 40, 8, False, 1, 4, True),
}


@dataclass(frozen=True)
class Setting:
    engine: str
    model: str
    case: str
    rows: int
    accumulate: int
    length: int
    documents: int
    attn: str
    steps: int
    warm: int
    checkpointing: bool = False
    compiled: bool = False
    eight_bits: bool = False
    memory: float | None = None
    nvme: str | None = None
    rate: float = 1e-4  # learning rate: updates that bf16 can represent show in the losses
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def tokens(self) -> int:
        return self.rows * self.accumulate * self.length


class Causal(nn.Module):
    """Packed rows -> their loss, the mean over tokens, without ever holding the logits. All engines train it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        base = self.inner.get_base_model() if hasattr(self.inner, "get_base_model") else self.inner
        hidden = base.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        hidden, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": mean_loss(hidden, base.lm_head.weight.to(hidden.dtype), targets)}


def mean_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of tokens whose target is not -100, in float32."""
    if hasattr(nn.functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        return nn.functional.linear_cross_entropy(hidden, head, targets, options=options).float()

    def of_part(rows: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy((rows @ head.T).float(), wanted, reduction="sum")

    parts = zip(hidden.split(PART), targets.split(PART), strict=True)
    sums = [checkpoint(of_part, rows, wanted, use_reentrant=False) for rows, wanted in parts]
    return torch.stack(sums).sum() / targets.ne(-100).sum()


def build(setting: Setting, device: torch.device, dtype: torch.dtype, place: torch.device | None = None) -> Causal:
    """The model with the same weights for every engine: drawn on `device` in fp32, kept in `dtype` on `place`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = setting.shape
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=setting.length,
        **attention_options(setting.attn),
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
        turns = type(model.model.rotary_emb)
    model = model.to(torch.bfloat16 if setting.case == "lora" else dtype).to_empty(device=place or device)
    with torch.device(device):
        model.model.rotary_emb = turns(config=config)
    if shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    drawn = torch.Generator(device).manual_seed(setting.seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=drawn, device=device) * 0.02)
            else:
                p.fill_(float(name.endswith("norm.weight")))
    if setting.checkpointing:
        enable_checkpointing(model, False)
    if setting.case == "lora":
        with_adapters(model, drawn, dtype, place or device)
    if setting.compiled:
        compile_blocks(model)
    return Causal(model.train())


def compile_blocks(model: nn.Module) -> None:
    """Each block by itself, as usual: code common to all is compiled once."""
    for block in blocks_of(model):
        block.compile()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Qwen2DecoderLayer"]


def with_adapters(model: nn.Module, drawn: torch.Generator, dtype: torch.dtype, place: torch.device) -> None:
    """A frozen base, with LoRA on each linear layer of its blocks."""
    import peft

    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
    peft.inject_adapter_in_model(config, model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if p.requires_grad:
            p.data = (torch.randn(p.shape, generator=drawn, device=drawn.device) * 0.02).to(place, dtype)


def operations(setting: Setting) -> float:
    """Operations per token, forward and backward; see [Note: floating-point operations]."""
    shape = setting.shape
    hidden, inner, keys = shape.hidden, shape.inner, shape.hidden // shape.heads * shape.kv_heads
    block = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    block += [(hidden, inner), (hidden, inner), (inner, hidden)]
    matrices = shape.layers * sum(rows * columns for rows, columns in block) + hidden * shape.vocabulary
    adapters = shape.layers * sum(LORA_RANK * (rows + columns) for rows, columns in block)
    pairs = sum(d * (d + 1) / 2 for d in lengths(setting)) / setting.length
    own = 4 * matrices + 6 * adapters if setting.case == "lora" else 6 * matrices
    return own + 12 * shape.layers * hidden * pairs


def lengths(setting: Setting) -> list[int]:
    """Of the documents in a row."""
    every = setting.length // setting.documents
    return [every] * (setting.documents - 1) + [setting.length - every * (setting.documents - 1)]


def batches(setting: Setting) -> list[dict[str, Tensor]]:
    """All micro-batches of a process, on the CPU."""
    source = torch.Generator().manual_seed(1 + setting.seed)
    positions = torch.cat([torch.arange(n) for n in lengths(setting)]).expand(setting.rows, -1).contiguous()
    found = []
    for _ in range((setting.warm + setting.steps) * setting.accumulate):
        ids = torch.randint(setting.shape.vocabulary, (setting.rows, setting.length), generator=source)
        labels = ids.masked_fill(positions == 0, -100)
        found.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return found


def steps_of(setting: Setting, device: torch.device) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of each step, on `device`."""
    rows = [{name: value.to(device) for name, value in micro.items()} for micro in batches(setting)]
    return [rows[i : i + setting.accumulate] for i in range(0, len(rows), setting.accumulate)]
