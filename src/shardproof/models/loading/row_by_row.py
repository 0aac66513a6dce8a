"""Processors and models that come with their own code, wrapped to be called like transformers' own.

[Note: row by row] A processor of that kind (MiniCPM-V 2.6) pads on the left and counts the places of images from there,
and takes images as one list per row. So each row is processed separately, and rows are put together here, padded on the
right as everywhere. It does not say what it inserts for an image either: the data package locates answers by encoding
the text before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The inputs that a forward with one dict passes on to its language model.
_HANDED_ON = (
    "attention_mask",
    "labels",
    "num_items_in_batch",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
)

# The inputs that such a model reads before it generates; the others are for the generation.
_DATA = ("input_ids", "position_ids", "pixel_values", "tgt_sizes", "image_bound", "image_sizes")


def row_by_row(processor: Any, marks: Mapping[str, str]) -> Any:
    """The same processor, called like those of transformers: with texts, and images as one list per row.

    Args:
        marks: the mark of each kind of file in a text.

    It may add tokens at the start of a text (`begins_texts`). Its batches have `input_ids`, `attention_mask` and
    `position_ids` (each int64, rows x length, padded on the right), and a list with one element per row for everything
    else.
    """
    cls = type(processor)

    def call(self: Any, text: list[str], images: Any = None, return_tensors: str | None = None, **_: Any) -> Any:
        pictures = images if images is not None else [[] for _ in text]
        made = [
            dict(cls.__call__(self, [one], images=[list(some)], return_tensors="pt"))
            for one, some in zip(text, pictures, strict=True)
        ]
        ids = [row.pop("input_ids")[0] for row in made]
        return {"input_ids": [row.tolist() for row in ids]} if return_tensors is None else _batch(self, ids, made)

    own = {"__call__": call, "begins_texts": True, **{f"{kind}_token": mark for kind, mark in marks.items()}}
    processor.__class__ = type(cls.__name__, (cls,), {**own, "__module__": cls.__module__})
    return processor


def _batch(processor: Any, ids: list[Any], made: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=processor.tokenizer.pad_token_id)
    places = torch.arange(padded.shape[1]).expand_as(padded)
    mask = (places < torch.tensor([[len(row)] for row in ids])).long()
    files = {name: [row[name][0] for row in made] for name in made[0] if name != "attention_mask"}
    return {"input_ids": padded, "attention_mask": mask, "position_ids": places.clone(), **files}


def _complete(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of text alone, completed with the keys that such code expects: no row has a file."""
    import torch

    ids = inputs.get("input_ids")
    if ids is None or "pixel_values" in inputs:  # complete already
        return inputs
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    none: dict[str, Any] = {name: [[] for _ in ids] for name in ("pixel_values", "tgt_sizes", "image_sizes")}
    bounds = [torch.empty(0, 2, dtype=torch.long, device=ids.device) for _ in ids]
    return {"position_ids": places, "image_bound": bounds, **none, **inputs}


def fed_with_data(model: Any) -> Any:
    """The same model (changed in place), whose forward takes inputs by name and passes them on in one dict.

    Its `generate` is that of its language model, after `get_vllm_embedding`, which inserts the image features into the
    text embeddings: it takes the same arguments as transformers' own, and returns the prompt with its answer, (rows,
    length). The model's own one needs a tokenizer and runs in inference mode, where nothing can be gathered.
    """
    cls = type(model)

    def forward(self: Any, **inputs: Any) -> Any:
        handed_on = {name: inputs.pop(name) for name in _HANDED_ON if name in inputs}
        return cls.forward(self, _complete(inputs), **handed_on)

    def generate(self: Any, **inputs: Any) -> Any:
        import torch

        data = {name: inputs.pop(name) for name in _DATA if name in inputs}
        with torch.no_grad():
            found = self.get_vllm_embedding(data)
            words = found[0] if isinstance(found, tuple) else found
            answer = self.llm.generate(inputs_embeds=words, **inputs)
        return torch.cat([data["input_ids"], answer], dim=1)

    own = {"forward": forward, "generate": generate, "__module__": cls.__module__}
    model.__class__ = type(cls.__name__, (cls,), own)
    return model
