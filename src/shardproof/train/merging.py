"""Adapters merged into the weights of their model, and whether it computes the same then."""

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
MERGED = 1e-3  # what merging may change of the logits, in fp32, relative to the largest


def merged(model: Any, ids: Any, rounded: bool) -> tuple[Any, float | None]:
    """The model without its adapters, and how far merging moves its logits, relative to the largest; None where there
    is no memory to compare them.

    Half precision rounds every product of that comparison, and moves logits by a percent. So both sides of it are
    computed in fp32, and what is merged is rounded once, where it is: to the dtypes of its base, if `rounded`.

    Raises:
        ConfigError: merging makes another model.
    """
    how = model.active_peft_config
    if not hasattr(model, "merge_and_unload") or getattr(how, "alora_invocation_tokens", None):
        raise ConfigError(
            f"What was trained (PEFT's {how.peft_type.value}) is beside the model, or there for some inputs only, and"
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
    except (ValueError, NotImplementedError) as reason:  # of BEFT, which learns biases that a layer may not have
        raise ConfigError(f"PEFT cannot merge these: {reason}. {INSTEAD}") from reason
    error = None if before is None else float((logits(model, ids) - before).abs().max() / before.abs().max())
    if error is not None and not error <= MERGED:
        why = "they do not fit"
        if shared:
            why = f"{' and '.join(shared)} share one weight, and have adapters of their own. `infer` and PEFT load them"
            why += " as they are"
        raise ConfigError(f"Merging the adapters changes the logits by {error:.1g} of the largest: {why}.")
    for name, value in _values(model):
        if rounded and name in own:
            value.data = value.data.to(own[name])
    return model, error


def _fits_in_fp32(model: Any) -> bool:
    """Whether all of a model in half precision can be there in fp32; says so where it cannot."""
    more = sum({id(value): value.nbytes for _, value, _ in _halves(model)}.values())
    left = host_memory()
    if more < 0.9 * left or not left:
        return True
    log.warning(
        "Adapters are merged in fp32 layer by layer, and the logits of before are not compared with those of the "
        "merged model: that takes %.3g GB more, and this machine has %.3g GB left.",
        *(more / 1e9, left / 1e9),
    )
    return False


def _merge_each(model: Any) -> None:
    """Merge the adapters of one layer after the other, each in fp32, rounded once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            halves = _widen(layer)
            if hasattr(layer, "unload_and_optionally_merge_module"):  # merged when it is unloaded
                continue
            layer.merge(safe_merge=True)
            for _, value, dtype in halves:
                value.data = value.data.to(dtype)


def _widen(module: Any) -> list[tuple[str, Any, Any]]:
    """Give what is in half precision to fp32. Returns what that was."""
    halves = list(_halves(module))
    for _, value, _ in halves:
        value.data = value.data.float()
    return halves


def _halves(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, value and dtype of what is in half precision."""
    import torch

    half = (torch.bfloat16, torch.float16)
    return ((name, value, value.dtype) for name, value in _values(module) if value.dtype in half)


def _untie(model: Any) -> None:
    """Give the head a weight of its own where it is the embedding's and one of the two has adapters, or tokens that are
    trained: merged into the one weight of both, they would change the other, too, and those of both would be added."""
    import torch

    ends = model.get_output_embeddings(), model.get_input_embeddings()
    tokens = [getattr(end, "token_adapter", None) for end in ends]  # of a wrapper, which hides its layer
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
    """Parameters and buffers with all their names, also those that no file holds."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _plain(name: str) -> str:
    """What PEFT's name of a weight is without adapters."""
    return re.sub(
        r"\.(base_layer|original_module|token_adapter)(?=\.)", "", name
    )  # a module may be wrapped several times


def logits(model: Any, ids: Any) -> Any:
    """Of token ids; of a model without a head its hidden states. In fp32."""
    import torch

    with torch.no_grad():
        found = model.eval()(input_ids=ids)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).float()
