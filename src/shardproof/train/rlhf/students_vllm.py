"""vLLM generates the student's answers for TRL's GKD, which itself can only generate with models."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.generation.vllm_generation import VLLMGeneration

from shardproof.integrations.prepared import is_sharded
from shardproof.integrations.server import serve_weights


class StudentsVllm:
    """TRL's vLLM client as in its GRPO, which is sent the weights at each step. Collective: all ranks call it.

    Args:
        trainer: the trainer, for its model and accelerator.
        tokenizer: the tokenizer of that model.
        how: the other arguments of TRL's `VLLMGeneration`.
    """

    def __init__(self, trainer: Any, tokenizer: Any, how: dict[str, Any]) -> None:
        self._pad, self._loaded = tokenizer.pad_token_id, -1
        self._vllm = VLLMGeneration(
            model=trainer.model, accelerator=trainer.accelerator, processing_class=tokenizer, **how
        )
        serve_weights(self._vllm, trainer.model, is_sharded)

    def answers(
        self, prompts: torch.Tensor, mask: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, mask and labels of rows with their answers (B, P + T), for `prompts` (B, P), padded on the left."""
        if step != self._loaded:
            self._vllm.sync_weights()
            self._loaded = step
        given = [row[real.bool()].tolist() for row, real in zip(prompts, mask, strict=True)]
        written = [torch.tensor(ids) for ids in self._vllm.generate(prompts=given, images=None, num_generations=1)[1]]
        behind = pad_sequence(written, batch_first=True, padding_value=self._pad).to(prompts)
        real = pad_sequence([torch.ones_like(ids) for ids in written], batch_first=True).to(mask)
        ids, learnt = torch.cat([prompts, behind], 1), torch.cat([torch.zeros_like(mask), real], 1)
        return ids, torch.cat([mask, real], 1), ids.masked_fill(learnt == 0, -100)
