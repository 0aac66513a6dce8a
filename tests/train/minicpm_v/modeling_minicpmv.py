"""A small model in the shape of MiniCPM-V 2.6: `llm`, `vpm` and `resampler`, and a forward that takes one dict.

Written for the tests, from the names and shapes that its users meet; none of its code is here.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2ForCausalLM, SiglipVisionModel

from .configuration_minicpmv import MiniCPMVConfig


class Resampler(nn.Module):
    """Of the patches of a picture, so many vectors of the language model as there are queries."""

    def __init__(self, queries: int, width: int, seen: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.kv_proj = nn.Linear(seen, width, bias=False)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_post = nn.LayerNorm(width)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(pictures, patches, seen) -> (pictures, queries, width)"""
        values = self.kv_proj(patches)
        return self.ln_post(self.attn(self.query.expand(len(patches), -1, -1), values, values)[0])


class MiniCPMV(PreTrainedModel):
    config_class = MiniCPMVConfig

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config)
        self.llm = Qwen2ForCausalLM(config)
        self.vpm = SiglipVisionModel(config.vision_config)
        self.resampler = Resampler(config.query_num, config.hidden_size, config.vision_config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.llm.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.llm.embed_tokens = value

    def get_output_embeddings(self):
        return self.llm.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.llm.lm_head = new_embeddings

    def get_vllm_embedding(self, data):
        """Words, with what was seen in the places (`image_bound`) that wait for it, (rows, length, width); and that by
        itself."""
        words = self.llm.get_input_embeddings()(data["input_ids"])
        rows, found = [], []
        for row, pictures, bounds in zip(words, data["pixel_values"], data["image_bound"], strict=True):
            if len(pictures):
                seen = self.resampler(self.vpm(torch.stack(list(pictures))).last_hidden_state)
                places = torch.cat([torch.arange(start, end, device=row.device) for start, end in bounds.tolist()])
                row = row.index_copy(0, places, seen.flatten(0, 1))
                found.append(seen)
            rows.append(row)
        return torch.stack(rows), found

    def forward(self, data, **kwargs):
        return self.llm(
            input_ids=None, position_ids=data["position_ids"], inputs_embeds=self.get_vllm_embedding(data)[0], **kwargs
        )
