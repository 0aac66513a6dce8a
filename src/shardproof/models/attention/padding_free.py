"""Batches without padding: `--padding-free`.

Most of a model's computation is also done for padding. So where a padded batch enters the decoder, its tokens are
concatenated as in packed rows, and the decoder's output is arranged in rows again. The caller of the model sees a
padded batch, with zeros as padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardproof.errors import ConfigError
from shardproof.models.attention.laid_out import change_tensors, in_space, is_per_token, laid_out, put_in_places
from shardproof.models.attention.varlen import knows_ours
from shardproof.models.forward import tried, without_adapters

OPTION = "--padding-free"
BY_DOCUMENTS = "varlen", "flash"  # prefixes of attentions whose cost is that of the documents alone


class PaddingFree:
    """The hooks of a decoder. Generation with a cache is left alone.

    Attributes:
        on: whether tokens are concatenated.
        used: how often they were.
    """

    def __init__(self, in_space: bool) -> None:
        self.on, self.used, self._in_space = True, 0, in_space
        self._entered: list[tuple[Tensor, tuple[int, ...]] | None] = []

    def enter(self, decoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        found = self._found(args, given) if self.on else None
        self._entered.append(found and (found[0][0], found[2]))
        if found is None:
            return None
        places, positions, rows = found
        self.used += 1
        args, packed = laid_out(args, given, rows, places, positions, self._in_space)
        return args, packed | {"use_cache": False} | ({"cache_position": None} if "cache_position" in given else {})

    def leave(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        entered = self._entered.pop()
        return output if entered is None else change_tensors(output, lambda value: _in_rows(value, *entered))

    def _found(self, args: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
        """Where tokens are in the padded rows, their positions, and the rows; None if nothing is to change."""
        mask, own = given.get("attention_mask"), given.get("position_ids")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_meta or given.get("use_cache"):
            return None
        rows = tuple(mask.shape)
        tokens = [*args, given.get("input_ids"), given.get("inputs_embeds")]
        if given.get("past_key_values") is not None or not any(is_per_token(value, rows) for value in tokens):
            return None
        mask = mask.bool()
        places = mask.flatten().nonzero().view(1, -1)
        positions = put_in_places(mask.long().cumsum(1) - 1, places)
        if places.numel() in (0, mask.numel()):
            return None
        if own is not None and own.ndim == 2 and not put_in_places(own.expand(rows), places).equal(positions):
            return None
        return places, positions, rows


def _in_rows(value: Tensor, places: Tensor, rows: tuple[int, ...]) -> Tensor:
    """A decoder's output for concatenated tokens, arranged in rows; also of experts' scores (tokens, experts)."""
    if tuple(value.shape[:2]) == (1, len(places)):
        return _spread(value[0], places, rows).unflatten(0, rows)
    return _spread(value, places, rows) if value.ndim == 2 and len(value) == len(places) else value


def _spread(tokens: Tensor, places: Tensor, rows: tuple[int, ...]) -> Tensor:
    return tokens.new_zeros(rows[0] * rows[1], *tokens.shape[1:]).index_copy(0, places, tokens)


def make_padding_free(model: Any) -> None:
    """Make a model's decoder compute padded batches without their padding.

    Raises:
        ConfigError: no decoder is found, or its attention would compare all pairs of tokens in a batch.
    """
    if not hasattr(model, "get_decoder"):
        raise ConfigError(f"{OPTION}: {type(model).__name__} has no decoder of its own. Leave {OPTION} out.")
    attention = str(getattr(model.config, "_attn_implementation", None) or "its own")
    if not attention.startswith(BY_DOCUMENTS):
        raise ConfigError(
            f"{OPTION} concatenates the rows of a batch, and {attention} attention of {type(model).__name__} would "
            f"compare all of their tokens.\n{_way_out(model)}"
        )
    decoder = model.get_decoder()
    hooks = decoder.padding_free = PaddingFree(in_space(model))
    # Before all others: the hook that tells layers about documents (recurrent.py) looks at packed rows.
    decoder.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(hooks.leave, always_call=True)


def _way_out(model: Any) -> str:
    """The advice for an attention that compares all tokens, given what transformers supports for the model."""
    if not getattr(model, "_supports_flash_attn", False):
        return f"transformers has no other for it: leave {OPTION} out."
    ways = ["--attn varlen (on a GPU with --precision bf16 or fp16)"] if knows_ours(model) else []
    if "flash_attention_2" in (getattr(model, "_compatible_flash_implementations", None) or ["flash_attention_2"]):
        ways.append("--attn flash_attention_2")
    return f"Add {' or '.join(ways)}, or leave {OPTION} out." if ways else f"Leave {OPTION} out."


def check_padding_free(model: Any, ids: Tensor) -> None:
    """Check that tokens get the same result without padding as with it. Collective: every rank calls it.

    Args:
        ids: some tokens, of shape (length,).

    Raises:
        ConfigError: the results differ, or the decoder is not called in the required way.
    """
    decoder = without_adapters(model).get_decoder()
    hooks: PaddingFree | None = getattr(decoder, "padding_free", None)
    if hooks is None:
        return
    name = type(without_adapters(model)).__name__
    mask = torch.ones(3, len(ids), dtype=torch.int64, device=ids.device)
    mask[1, len(ids) // 2 :] = mask[2, -1] = 0
    met: list[Tensor] = []
    handle = decoder.register_forward_hook(lambda *of: met.append(of[-1][0].detach()))
    used = hooks.used
    try:
        with tried(model):
            for hooks.on in (False, True):
                model(input_ids=ids.expand(3, -1), attention_mask=mask, use_cache=False)
    except TypeError as error:
        raise ConfigError(f"{OPTION}: {name} cannot be tried: {error}. Leave {OPTION} out.") from error
    finally:
        handle.remove()
        hooks.on = True
    if hooks.used == used or len(met) != 2:
        raise ConfigError(f"{OPTION}: {name} does not give its decoder a mask of padding. Leave {OPTION} out.")
    padded, free = (hidden[mask.bool()].float() for hidden in met)
    most = 1e-4 if met[0].dtype == torch.float32 else 2e-2
    if float((padded - free).abs().max()) > most * float(padded.abs().max()):
        raise ConfigError(
            f"{OPTION}: in {name} with {model.config._attn_implementation} attention, tokens of concatenated rows "
            f"do not get the results that they get in separate rows.\nLeave {OPTION} out, or take another --attn."
        )
