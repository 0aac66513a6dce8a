"""Models of transformers whose forward fails on images or rows that others accept.

[Note: one token] Mistral 3 and Mistral Large 4 drop the token dimension if a batch has one image of a single token (28
x 28 pixels or less), and then fail to split the result. Such an image is processed twice here, and one result is
dropped.

[Note: image outputs] Llama 4 reads a field from its language model's output that only its own output has, so that every
forward of the full model fails, with or without images.

[Note: frozen codes] The module that turns images into codes (in Emu3, Chameleon, Janus) is frozen, which transformers
expresses by `eval()` when it is made, and every trainer undoes by `train()`: Emu3's then normalises over the images of
a batch, so that codes and losses depend on the batch, and updates the statistics that are saved.
"""

from __future__ import annotations

import functools
from typing import Any


def pictures_taken(model: Any) -> None:
    """Fix a model (in place) for the cases in the notes above."""
    for module in model.modules():
        cls: Any = type(module)
        if cls.__module__.startswith("transformers."):
            if cls.__name__ in ("Mistral3Model", "MistralLarge4Model"):
                module.__class__ = _with_one_token(cls)
            elif cls.__name__ == "Llama4ForCausalLM":
                module.__class__ = _with_image_outputs(cls)
            elif cls.__name__ in ("Emu3VQVAE", "ChameleonVQVAE", "JanusVQVAE"):
                module.__class__ = _in_eval(cls)
                module.eval()


@functools.cache
def _with_one_token(cls: Any) -> Any:
    def get_image_features(self: Any, pixel_values: Any, image_sizes: Any, *args: Any, **options: Any) -> Any:
        import torch

        one = torch.as_tensor(image_sizes).tolist()
        side = 2 * self.vision_tower.patch_size * self.config.spatial_merge_size
        if len(one) > 1 or max(one[0]) >= side:
            return cls.get_image_features(self, pixel_values, image_sizes, *args, **options)
        both = torch.cat([pixel_values, pixel_values]), torch.as_tensor(one * 2)
        outputs = cls.get_image_features(self, *both, *args, **options | {"return_dict": True})
        outputs.pooler_output = outputs.pooler_output[:1]
        return outputs

    return type(cls.__name__, (cls,), {"get_image_features": get_image_features, "__module__": cls.__module__})


@functools.cache
def _with_image_outputs(cls: Any) -> Any:
    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        outputs = cls.forward(self, *args, **inputs)
        if hasattr(outputs, "logits") and not hasattr(outputs, "image_outputs"):
            outputs.image_outputs = None
        return outputs

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@functools.cache
def _in_eval(cls: Any) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        return cls.train(self, False)

    return type(cls.__name__, (cls,), {"train": train, "__module__": cls.__module__})
