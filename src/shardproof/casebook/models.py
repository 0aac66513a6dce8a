"""Small models, data and losses that cases share. Sizes are odd on purpose: nothing divides evenly over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from shardproof.casebook.run import Run

FEATURES, WIDTH, HIDDEN, CLASSES, VOCABULARY = 6, 7, 11, 3, 53
Part = dict[str, Any]


class Block(nn.Module):
    """(n, 7) -> (n, 7), with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    """Embed, blocks, norm, head: the shape of every transformer. (n, 6) -> (n, 3)"""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def draw(step: int, rank: int, number: int = 0) -> torch.Generator:
    """A separate generator for each micro-batch."""
    return torch.Generator().manual_seed(10_000 * step + 100 * rank + number)


def numbers(step: int, rank: int) -> list[Part]:
    """One micro-batch of four rows: x of six features, y of three targets."""
    g = draw(step, rank)
    return [{"x": torch.randn(4, FEATURES, generator=g), "y": torch.randn(4, CLASSES, generator=g)}]


def two_parts(step: int, rank: int) -> list[Part]:
    """Two micro-batches of four rows."""
    return [part for number in (0, 1) for part in numbers(step, rank + 50 * number)]


def texts(step: int, rank: int) -> list[Part]:
    """One micro-batch of two rows of nine tokens."""
    return [{"input_ids": torch.randint(2, VOCABULARY, (2, 9), generator=draw(step, rank))}]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay, so that it shows if an unused parameter is updated; eps keeps noise on zeros small."""
    return torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.1, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam, it reveals a gradient that is off by a factor."""
    return torch.optim.SGD(trainable(model), lr=0.05, momentum=0.9)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without momentum or decay, so that no gradient and a gradient of zeros are equivalent."""
    return torch.optim.SGD(trainable(model), lr=0.1)


def mse(run: Run, part: Part) -> Tensor:
    return F.mse_loss(run.model(part["x"]), part["y"])


def plain(run: Run) -> None:
    """The usual training loop, over three steps."""
    for _ in run.steps(3):
        for part in run.parts():
            loss = (run.case.loss or mse)(run, part)
            run.backward(loss)
            run.record("loss", loss)
        run.step()


# --- language models, built from their configs ---------------------------------------------------------


def qwen(**changes: Any) -> Any:
    """A Qwen3 of some ten thousand weights."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "initializer_range": 0.2,  # large enough that a step changes the loss well above the noise of fp32
    }
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **changes}))


def with_lora(model: Any, **changes: Any) -> Any:
    """The model with LoRA adapters of rank 2 on q and v, everything else frozen."""
    import peft

    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**config))


def next_token(run: Run, part: Part) -> Tensor:
    return run.model(input_ids=part["input_ids"], labels=part["input_ids"]).loss


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token given those before it: (n, t, v), (n, t) -> (n, t - 1)."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
