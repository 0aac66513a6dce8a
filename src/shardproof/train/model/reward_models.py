"""Whether a model can judge: without a trained head it would silently give random rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardproof.data.forms.labels import Labels
from shardproof.errors import ConfigError
from shardproof.models.loading.classes import sees_ahead, with_values
from shardproof.models.scorers import HEADED, HEADS, load_scorer


def check_reward_model(model: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a model whose config or weights say that it has no head for rewards.

    A folder is inspected without importing anything; the config of a model from the hub is loaded by transformers.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        labels = len(config.get("id2label") or []) or (2 if config.get("problem_type") else 1)  # omitted for two
        classes = config.get("architectures") or []
        _check(model, classes, labels, any(name.startswith(HEADS) for name in _weights(folder)))
        return
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    classes = list(found.architectures or [])
    _check(model, classes, 1, any(name.endswith(HEADED) for name in classes))


def check_value_model(model: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a value model whose tokens see later tokens: the value of a token would depend on what is
    written after it."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if sees_ahead(found) or getattr(found, "is_encoder_decoder", False):
        raise ConfigError(
            f"--value-model {model} ({found.model_type}) has an encoder: each token sees those after it, so the"
            f" value of a token would depend on what is written later.\nName a decoder, or leave it out to start"
            f" from --model."
        )


def judges(folder: Path) -> bool:
    """Whether a folder holds a reward model, or adapters for one."""
    for name, key in (("adapter_config.json", "task_type"), ("config.json", "architectures")):
        if (folder / name).is_file():
            said = json.loads((folder / name).read_text(encoding="utf-8")).get(key) or []
            return said == "SEQ_CLS" or any(kind.endswith(HEADED) for kind in said)
    return False


def load_judge(
    source: str,
    pad_token_id: int | None,
    labels: Labels | None = None,
    how: Callable[..., Any] = with_values,
    **options: Any,
) -> Any:
    """The reward model, or the classifier for these labels, in a folder; a language model gets a new head for either.

    `how` and `options` are as for `load_pretrained`.
    """
    head = {"num_labels": 1} if labels is None else labels.config
    model = load_scorer(source, how=how, **head, **options)
    if labels is not None or model.config.get_text_config().pad_token_id is None:
        pads_with(model, pad_token_id)
    return model


def pads_with(model: Any, pad_token_id: int | None) -> None:
    """Set the padding token before which the model looks for its last token. This is done after loading: the embedding
    of a token that is the padding when a model is built is not trained, and in some models that token ends a text."""
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad_token_id


def _check(model: str, classes: Sequence[str], labels: int, has_head: bool) -> None:
    if not has_head:
        kind = classes[0] if classes else "model of no named class"
        raise ConfigError(
            f"--reward-model {model} is a {kind} without a reward head: its rewards would be random.\n"
            "Make a reward model of it first: shardproof rlhf --rlhf-type rm."
        )
    if labels != 1:
        raise ConfigError(f"--reward-model {model} has {labels} labels, but a reward is one number.")


def _weights(folder: Path) -> Iterator[str]:
    """The names of the weights in a folder; for old formats, which would have to be unpickled, the name of a head."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield HEADS[0]
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        yield from header
