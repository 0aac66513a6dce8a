"""Merges adapters into the weights of their model, and checks that it still computes the same."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.adapters.targets import sharing
from shardproof.zero.device import host_memory

log = logging.getLogger("shardproof")

INSTEAD = "`infer` and PEFT load them as they are."
MERGED = 1e-3  # allowed change of logits by merging in fp32, relative to the largest


def merged(model: Any, ids: Any, rounded: bool) -> tuple[Any, float | None]:
    """The model with its adapters merged, and how far that moves its logits, relative to the largest; None if there is
    not enough memory to compare them.

    Half precision rounds every product in that comparison, which moves logits by a percent. So both sides are computed
    in fp32, and merged weights are rounded only once: to the dtypes of the base, if `rounded`.

    Raises:
        ConfigError: the adapters cannot be merged, or merging changes the model.
    """
    how = model.active_peft_config
    if not hasattr(model, "merge_and_unload") or getattr(how, "alora_invocation_tokens", None):
        raise ConfigError(
            f"What was trained (PEFT's {how.peft_type.value}) works beside the model, or for some inputs only, and"
            f" cannot be merged into its weights. {INSTEAD}"
        )
    own = {_plain(name): dtype for name, _, dtype in _halves(model.get_base_model())}
    _untie(model)
    wrapped = ((name, m.base_layer) for name, m in model.named_modules() if hasattr(m, "base_layer"))
    shared = sharing(wrapped)
    before = None
    if rounded and not shared and not _fits_in_fp32(model):
        _merge_each(model)
    else:
        _widen(model)
        before = logits(model, ids)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="All adapters are already merged")
            model = model.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError) as reason:  # from BEFT, which learns biases that a layer may lack
        raise ConfigError(f"PEFT cannot merge these: {reason}. {INSTEAD}") from reason
    error = None if before is None else float((logits(model, ids) - before).abs().max() / before.abs().max())
    if error is not None and not error <= MERGED:
        why = "they do not fit"
        if shared:
            why = f"{' and '.join(shared)} share one weight but have adapters of their own. `infer` and PEFT load them"
            why += " as they are"
        raise ConfigError(f"Merging the adapters changes the logits by {error:.1g} of the largest: {why}.")
    for name, value in _values(model):
        if rounded and name in own:
            value.data = value.data.to(own[name])
    return model, error


def _fits_in_fp32(model: Any) -> bool:
    """Whether all half-precision weights of a model fit into memory in fp32; warns if they do not."""
    more = sum({id(value): value.nbytes for _, value, _ in _halves(model)}.values())
    left = host_memory()
    if more < 0.9 * left or not left:
        return True
    log.warning(
        "Adapters are merged in fp32 layer by layer, and the logits before are not compared with those of the "
        "merged model: that would take %.3g GB more, and this machine has %.3g GB left.",
        *(more / 1e9, left / 1e9),
    )
    return False


def _merge_each(model: Any) -> None:
    """Merge the adapters layer by layer, each in fp32 and rounded once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            halves = _widen(layer)
            if hasattr(layer, "unload_and_optionally_merge_module"):  # merged on unloading
                continue
            layer.merge(safe_merge=True)
            for _, value, dtype in halves:
                value.data = value.data.to(dtype)


def _widen(module: Any) -> list[tuple[str, Any, Any]]:
    """Convert half-precision values to fp32. Returns what was converted."""
    halves = list(_halves(module))
    for _, value, _ in halves:
        value.data = value.data.float()
    return halves


def _halves(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, value and dtype of all half-precision values."""
    import torch

    half = (torch.bfloat16, torch.float16)
    return ((name, value, value.dtype) for name, value in _values(module) if value.dtype in half)


def _untie(model: Any) -> None:
    """Untie the head from the embedding if one of the two has adapters or trained tokens: merged into their shared
    weight, those would change the other one too, and those of both would be added up."""
    import torch

    ends = model.get_output_embeddings(), model.get_input_embeddings()
    tokens = [getattr(end, "token_adapter", None) for end in ends]  # a wrapper hides its layer
    bare = tuple(getattr(one or end, "base_layer", end) for one, end in zip(tokens, ends, strict=True))
    head, embedding = bare
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    if not tied or bare == ends or any(one is not None and one.tied_adapter for one in tokens):  # PEFT keeps these
        return
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    base = model.get_base_model()
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False
    base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)


def _values(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers with all their names, including those that are in no file."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _plain(name: str) -> str:
    """The name of a weight without the components that PEFT adds."""
    return re.sub(
        r"\.(base_layer|original_module|token_adapter)(?=\.)", "", name
    )  # a module may be wrapped several times


def logits(model: Any, ids: Any) -> Any:
    """The logits for token ids, or the hidden states of a model without a head, in fp32."""
    import torch

    with torch.no_grad():
        found = model.eval()(input_ids=ids)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).float()
