"""Models with a head for scores: classifiers, rerankers, reward models, and value models.

[Note: heads of models that take files] transformers has sequence classification classes for nearly all text models, but
for few that take images or audio. For the others, one is made here with transformers' names: the model as it is trained
and saved elsewhere, whose forward is that of its backbone, and `score`, a linear layer on the last token, or on each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof.models.loading.classes import check_one_backbone, check_speaks, class_of, load_pretrained, with_values
from shardproof.models.loading.processors import processor_class, said_by

HEADED = "ForSequenceClassification"  # the suffix of such classes
HEADS = ("score.", "classifier.", "classification_head.")  # names of the head in transformers
SCORER, VALUER = f"AutoModel{HEADED}", "AutoModelForTokenClassification"
OF_CONFIG = ("num_labels", "id2label", "label2id", "problem_type", "pad_token_id")


def load_scorer(
    source: str,
    kind: str = SCORER,
    *,
    how: Callable[..., Any] = with_values,
    enable_audio_output: bool | None = None,
    **options: Any,
) -> Any:
    """Load the model from a folder or the hub with a head for scores, which is new if the folder has none.

    Args:
        kind: `SCORER` for a score per row; `VALUER` for one per token.
        how, enable_audio_output: as for `load_pretrained`, which also says what is raised.
        options: for `from_pretrained`. Those in `OF_CONFIG` are set in the model's config.

    Raises:
        ConfigError: it has no backbone that takes the same inputs as the model.
    """
    import transformers

    known = getattr(transformers, kind)
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=options.get("trust_remote_code", False))
    said = {name: options.pop(name) for name in OF_CONFIG if name in options}

    def change(config: Any) -> None:
        for name, value in said.items():
            setattr(config, name, value)

    if type(config) in known._model_mapping or kind in (getattr(config, "auto_map", None) or {}):
        if enable_audio_output is not None:
            check_speaks(source, config)
        change(config)
        return how(known, source, config=config, **options)
    loaded = load_pretrained(
        source,
        how=lambda found, *args, **more: how(_with_head(class_of(found, more["config"]), kind), *args, **more),
        enable_audio_output=enable_audio_output,
        change=change,
        **options,
    )
    if processor_class(source) is not None:
        check_one_backbone(loaded[0] if isinstance(loaded, tuple) else loaded, "A head for scores")
    return loaded


def made_here(folder: str | Path) -> str:
    """The class of a model in a folder if only `load_scorer` has it; empty if transformers has it."""
    import transformers

    said = said_by(str(folder), "config.json")
    kind = str((said.get("architectures") or [""])[0])
    return kind if kind.endswith(HEADED) and not said.get("auto_map") and not hasattr(transformers, kind) else ""


def last_places(mask: Any) -> Any:
    """The index of the last token of each row in an attention mask (rows, length) padded on either side."""
    return mask.shape[1] - 1 - mask.flip(1).argmax(1)


@functools.cache
def _with_head(cls: Any, kind: str) -> Any:
    """A class derived from `cls` that scores the last token of each row, or each token."""
    import torch
    from transformers import conversion_mapping
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, config, *args, **options)
        width = self.base_model.config.get_text_config().hidden_size
        self.score = torch.nn.Linear(width, config.num_labels, bias=kind == VALUER)  # as in transformers

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **inputs: Any) -> Any:
        """Logits of shape (rows, labels), of the last token that is not padding; or (rows, tokens, labels)."""
        hidden = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        if kind == SCORER:
            last = -1 if attention_mask is None else last_places(attention_mask)
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), last]
        return SequenceClassifierOutputWithPast(logits=self.score(hidden))

    name = re.sub(r"For[A-Z]\w*$", "", cls.__name__) + kind.removeprefix("AutoModel")
    # The names of weights in files, which transformers looks up by the class name.
    if (renamed := conversion_mapping.get_checkpoint_conversion_mapping(cls.__name__)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (cls,), {"__init__": init, "forward": forward, "__module__": cls.__module__})
