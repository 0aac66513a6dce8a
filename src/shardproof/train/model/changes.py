"""What a run changes in the model it starts from: new tokens, and how far its positions reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardproof.errors import ConfigError

ROPES = ("linear", "dynamic", "yarn")  # kinds that need nothing but a factor
CHANGES = (TOKENS := "new_special_tokens", "rope_scaling", "max_model_len")


# --- tokens ------------------------------------------------------------------------------------------


def tokens_of(names: list[str]) -> list[str]:
    """The tokens that --new-special-tokens names: the names themselves, or the lines of a .txt file.

    Raises:
        ConfigError: the file cannot be read, or a token is listed twice or empty.
    """
    if len(names) != 1 or not names[0].endswith(".txt"):
        found = names
    else:
        try:
            found = Path(names[0]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"--new-special-tokens {names[0]} cannot be read: {reason}.") from None
        found = [line.strip() for line in found if line.strip()]
        if not found:
            raise ConfigError(f"--new-special-tokens {names[0]} has no tokens: write one per line.")
    twice = next((token for i, token in enumerate(found) if token in found[:i] or not token.strip()), None)
    if twice is not None:
        raise ConfigError(f"--new-special-tokens: the token {twice!r} {'is listed twice' if twice else 'is empty'}.")
    return found


def add_tokens(tokenizer: Any, names: list[str]) -> None:
    """Add these tokens to the tokenizer as special tokens."""
    if names:
        tokenizer.add_tokens(tokens_of(names), special_tokens=True)


def grow(model: Any, tokenizer: Any) -> None:
    """Give a model's embedding, and its head if it has one, a row for each token. New rows are drawn around the mean of
    the others (transformers' mean resizing), from the same random numbers on all ranks.

    If the weights are still to be read, embedding and head are read in full, and sharded with the rest.

    Raises:
        ConfigError: the embedding of the model is not where transformers looks for it.
    """
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        rows = embedding.weight.shape[0]
    except (NotImplementedError, AttributeError) as error:
        raise ConfigError(
            f"--new-special-tokens: {type(model).__name__} does not say which module embeds its tokens."
        ) from error
    if len(tokenizer) <= rows:
        return
    for module in (embedding, head):
        for p in () if module is None else module.parameters(recurse=False):
            read_whole(p)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=True)


def read_whole(p: Any) -> None:
    """Read the values of a parameter now that would otherwise be read when it is sharded, if any."""
    from shardproof.zero.build import READER

    if (read := p.__dict__.pop(READER, None)) is not None:
        p.data = read(0, p.numel()).to(p.dtype).view(p.shape).clone()


# --- positions ---------------------------------------------------------------------------------------


def check_rope(scaling: Mapping[str, str], longest: int | None) -> None:
    """Raise ConfigError for an invalid scaling."""
    kind = scaling.get("type")
    for name in scaling:
        if name not in ("type", "factor"):
            raise ConfigError(f"--rope-scaling {name}={scaling[name]}: use type and factor: type=yarn,factor=2.")
    if scaling and kind not in ROPES:
        raise ConfigError(
            f"--rope-scaling: the type must be one of {', '.join(ROPES)}: --rope-scaling type=yarn,factor=2."
        )
    if scaling and "factor" not in scaling and longest is None:
        raise ConfigError(f"--rope-scaling {kind} needs a factor: add factor=2, or --max-model-len.")
    if "factor" in scaling:
        try:
            right = 1 <= float(scaling["factor"]) < math.inf
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f"--rope-scaling factor={scaling['factor']}: must be a number of 1 or more.")


def stretch(config: Any, scaling: Mapping[str, str], longest: int | None) -> None:
    """Extend the positions of a model in its config, which is saved with it: they are scaled by the factor, or by the
    smallest whole number that fits `longest` tokens. Without a scaling, only the config's maximum is set to `longest`.

    Raises:
        ConfigError: it has no rotary positions that a factor can scale, or its config names no length.
    """
    if not scaling and longest is None:
        return
    text = config.get_text_config()
    if not scaling:
        text.max_position_embeddings = longest
        return
    ropes = getattr(text, "rope_parameters", None)
    if isinstance(ropes, dict) and any(isinstance(part, dict) for part in ropes.values()):
        raise ConfigError(
            f"--rope-scaling: {config.model_type} has separate rotary positions for each type of layer"
            f" ({', '.join(ropes)}), and one factor would scale them all. Change rope_parameters in the config.json"
            f" of a copy of the model instead."
        )
    if not isinstance(ropes, dict) or "rope_theta" not in ropes:
        raise ConfigError(f"--rope-scaling: {config.model_type} has no rotary positions that a factor would scale.")
    before = ropes.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
    if not before:
        raise ConfigError(
            f"--rope-scaling: the config of {config.model_type} does not say how many tokens it can hold."
        )
    factor = float(scaling["factor"]) if "factor" in scaling else float(max(1, math.ceil((longest or 0) / before)))
    others = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
    kept = {name: ropes[name] for name in others if name in ropes}
    text.rope_parameters = kept | {
        "rope_type": scaling["type"],
        "factor": factor,
        "original_max_position_embeddings": before,
    }
    text.max_position_embeddings = longest or int(before * factor)


def stretching(config: Any) -> Callable[[Any], None] | None:
    """The function that changes the model's config under these options; None if nothing changes."""
    scaling, longest = getattr(config, "rope_scaling", {}), getattr(config, "max_model_len", None)
    return (lambda found: stretch(found, scaling, longest)) if scaling or longest else None


def changed_by(folder: Path) -> Any:
    """The options with which the run of this model folder changed its model; None for folders outside a run."""
    from shardproof.train.folder import CONFIG, recorded_in
    from shardproof.train.options.config import SftConfig

    if not (folder.parent / CONFIG).is_file():
        return None
    said = recorded_in(folder.parent)
    return SftConfig(**{name: said[name] for name in CHANGES if said.get(name)})
