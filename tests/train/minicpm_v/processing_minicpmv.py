"""The processor of the small MiniCPM-V 2.6: it marks places of pictures in ids, and pads rows on the left."""

from __future__ import annotations

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

MARK = "(<image>./</image>)"


class MiniCPMVImageProcessor(BaseImageProcessor):
    def __init__(self, side: int = 28, query_num: int = 4, **kwargs) -> None:
        super().__init__(**kwargs)
        self.side, self.query_num = side, query_num

    def preprocess(self, images, **kwargs) -> BatchFeature:
        """Lists of pictures, one for each row, to lists of tensors (3, side, side)."""
        rows = [[self._tensor(picture) for picture in row] for row in images]
        return BatchFeature({"pixel_values": rows, "tgt_sizes": [torch.full((len(row), 2), 2) for row in rows]})

    def _tensor(self, picture) -> torch.Tensor:
        pixels = np.asarray(picture.convert("RGB").resize((self.side, self.side)), dtype=np.float32)
        return torch.from_numpy(pixels.transpose(2, 0, 1) / 127.5 - 1)


class MiniCPMVProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None, **kwargs) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    def __call__(self, text, images=None, return_tensors="pt", **kwargs) -> BatchFeature:
        seen = self.image_processor.preprocess(images)
        ids = []
        for row, pictures in zip(text, images, strict=True):
            assert row.count(MARK) == len(pictures), "as many pictures as marks are needed"
            place = "<image>" + "<unk>" * self.image_processor.query_num + "</image>"
            ids.append(torch.tensor(self.tokenizer.encode(row.replace(MARK, place), add_special_tokens=False)))
        length = max(map(len, ids))
        pad = self.tokenizer.pad_token_id
        padded = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0), value=pad) for row in ids])
        mask = torch.stack([torch.arange(length) >= length - len(row) for row in ids])
        data = {"input_ids": padded, "attention_mask": mask, "image_bound": [self._bounds(row) for row in padded]}
        sizes = [[picture.size for picture in row] for row in images]
        return BatchFeature({**data, **seen, "image_sizes": sizes})

    def _bounds(self, ids: torch.Tensor) -> torch.Tensor:
        start, end = self.tokenizer.convert_tokens_to_ids(["<image>", "</image>"])
        starts, ends = (torch.where(ids == token)[0] for token in (start, end))
        return torch.stack([starts + 1, ends], dim=1)
