"""The configuration of a small MiniCPM-V 2.6: that of its language model, and of its tower."""

from __future__ import annotations

from transformers import Qwen2Config, SiglipVisionConfig


class MiniCPMVConfig(Qwen2Config):
    model_type = "minicpmv"

    def __init__(self, vision_config=None, query_num: int = 4, **kwargs) -> None:
        super().__init__(**kwargs)
        values = vision_config.to_dict() if isinstance(vision_config, SiglipVisionConfig) else vision_config or {}
        self.vision_config = SiglipVisionConfig(**values)
        self.query_num = query_num
