"""Cheaper ways to compute the same loss, each tried on a few tokens before it is relied on.

Models may be of any class. So the assumptions of a shortcut are not looked up in a table: the first step tests them on
the model itself, at the cost of a forward pass over a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardproof.data.encoding.pack import wants_flat
from shardproof.data.encoding.weights import WEIGHTS
from shardproof.errors import ConfigError
from shardproof.models.attention.laid_out import put_in_places
from shardproof.models.forward import tried, without_adapters
from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.packed_files import PLACES, packed_files, packed_labels
from shardproof.train.losses.tokens import token_mean
from shardproof.train.model.few import FEW
from shardproof.train.model.shared_rows import check_loss_of_parts, check_packed_in_parts, compare

LARGE = 16.0  # a logit that a cap would change
LABELS = ("labels", "shift_labels", WEIGHTS)


def checks(
    packed: bool,
    chunked: bool,
    few: Callable[[], Iterator[dict[str, Any]]] | None,
    shared: bool = False,
    weighed: Weighed | None = None,
) -> list[Callable[[Any, Any], None]]:
    """The checks of a model with the inputs of the first step, to be run from the last one.

    Args:
        packed, chunked: whether rows are packed, and whether `chunked_loss` is used.
        few: for a model that takes files: makes batches of a few rows that are packed or shared.
        shared: whether ranks hold parts of rows.
        weighed: the check for tokens with weights.
    """
    if few is None:
        asked = (
            (check_packing, packed),
            (check_chunked_loss, chunked),
            (weighed, weighed and weighed.may_be and not chunked),
            (check_loss_of_parts, shared),
            (check_packed_in_parts, packed and shared),
        )
        return [check for check, wanted in asked if check and wanted]
    option = "--packing" if packed else "--sequence-parallel"
    loss = partial(check_chunked_loss, option="--chunked-loss" if chunked else option)

    def files(model: Any, _: Any) -> None:
        for batch in few():
            if packed:
                check_packed_files(model, batch)
            if shared:
                real = batch[PLACES[0]].ge(0) if PLACES[0] in batch else None
                with packed_files(model, batch):
                    compare(model, {k: v for k, v in batch.items() if k not in (*LABELS, *PLACES)}, real)

    return [files, loss]


def check_packing(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Check that rows packed into one do not attend to each other. Collective: every rank calls it.

    Raises:
        ConfigError: a token's logits depend on the row before its own.
    """
    first = inputs["input_ids"].flatten()
    first = first.repeat(-(-3 * FEW // len(first)))[: 3 * FEW]
    row, other, another = first.view(3, FEW)
    if other.equal(another):
        another = another.roll(1)
    pairs = torch.stack([torch.cat([other, row]), torch.cat([another, row])])
    positions = torch.arange(FEW, device=pairs.device).repeat(2, 2)
    pieces = 2 if wants_flat(attention_of(model)) else 1
    batches = zip(pairs.chunk(pieces), positions.chunk(pieces), strict=True)
    try:
        with tried(model):
            logits = [model(input_ids=ids, position_ids=at, use_cache=False).logits for ids, at in batches]
    except TypeError as error:
        raise ConfigError(
            f"--packing: {type(model).__name__} does not accept position_ids. Leave --packing out."
        ) from error
    a, b = torch.cat(logits)[:, FEW:].detach()
    # A row that only attends to itself gives the same bits in both; experts may be summed in another order.
    if float((a - b).abs().max()) > float(a.abs().max()) * (1e-5 if a.dtype == torch.float32 else 2e-2):
        raise ConfigError(
            f"--packing: in {type(model).__name__} with {attention_of(model)} attention, the result for a token"
            f" depends on the row packed before its own.\nLeave --packing out, or use another --attn."
        )


def check_packed_files(model: Any, inputs: dict[str, Any]) -> None:
    """Check that packed rows have the same hidden states as separate rows. Collective: every rank calls it.

    Args:
        inputs: a batch of a few rows, packed into one.

    Raises:
        ConfigError: they differ, or the decoder is not called in a known way.
    """
    if PLACES[0] not in inputs:  # their files are lost
        return
    alone = {name: value for name, value in inputs.items() if name not in PLACES}
    with tried(model):
        expected = put_in_places(hidden_states(model, alone).detach(), inputs[PLACES[0]])
        found = hidden_states(model, inputs).detach()
    most = 1e-4 if found.dtype == torch.float32 else 2e-2
    if found.shape != expected.shape or float((found - expected).abs().max()) > most * float(expected.abs().max()):
        raise ConfigError(
            f"--packing: in {type(model).__name__} with {attention_of(model)} attention, packed rows with files do"
            f" not give the results that each gives alone.\nLeave --packing out, or use another --attn."
        )


def attention_of(model: nn.Module) -> str:
    """The name of the model's attention in transformers, or `its own`."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own")


def chunked_loss(
    model: Any, inputs: dict[str, Any], num_items: Any = None, dft: bool = False, smoothing: float = 0.0
) -> torch.Tensor:
    """The causal loss without full logits: the head is applied to the last hidden states a chunk at a time.

    Returns: the sum over learned tokens divided by `num_items` (their number, if None), a scalar in float32. With
        `dft`, each loss is multiplied by the probability of its token, and with `token_weights` in the inputs, by its
        weight. `smoothing`: see `chunked_cross_entropy`.
    """
    hidden = hidden_states(model, inputs)
    return _loss_of_hidden(model, hidden, inputs, num_items, dft, smoothing)


def hidden_states(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The inputs of the model's head, [rows, length, width]; packed if the rows are to be packed."""
    rest = {name: value for name, value in inputs.items() if name not in (*LABELS, *PLACES)} | {"use_cache": False}
    last = _meeting(head_of(model), lambda hidden: hidden[:, -1:].contiguous())
    with last as met, packed_files(model, inputs):
        model(**rest)
    return met.pop()


@contextmanager
def _meeting(head: nn.Module, given: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Collects the inputs of the head, and passes something else to it. So the model itself computes its hidden states,
    from whatever files and layers, but not its logits."""
    met: list[torch.Tensor] = []

    def meet(module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        met.append(args[0])
        return given(args[0])

    handle = head.register_forward_pre_hook(meet)
    try:
        yield met
    finally:
        handle.remove()


def _loss_of_hidden(
    model: Any,
    hidden: torch.Tensor,
    inputs: dict[str, Any],
    num_items: Any = None,
    dft: bool = False,
    smoothing: float = 0.0,
) -> torch.Tensor:
    head = head_of(model)
    if "shift_labels" in inputs:  # for a part of a row, whose last token predicts the first of the next part
        targets, weights = inputs["shift_labels"], inputs.get(WEIGHTS)
    else:
        hidden, targets = hidden[:, :-1], packed_labels(inputs)[:, 1:]
        weights = packed_labels(inputs, WEIGHTS)[:, 1:] if WEIGHTS in inputs else None
    learnt = targets.ne(-100).to(hidden.device)
    hidden, targets = hidden[learnt], targets.to(hidden.device)[learnt]
    shares = None if weights is None else weights.to(hidden.device)[learnt]
    divisor = max(1, len(targets)) if num_items is None else num_items
    return chunked_cross_entropy(hidden, head.weight, head.bias, targets, divisor, dft, smoothing, shares=shares)


def check_chunked_loss(model: Any, inputs: dict[str, Any], option: str = "--chunked-loss") -> None:
    """Check that `chunked_loss` is the loss of this model. Collective: every rank calls it.

    Args:
        option: the option that requires it.

    Raises:
        ConfigError: the loss differs, or cannot be computed.
    """
    ids, outputs, hidden, same = _tried_head(model, inputs, option)
    own, ours = float(outputs.loss.detach()), float(_loss_of_hidden(model, hidden, {"labels": ids}).detach())
    if not same or abs(own - ours) > 1e-2 * max(1.0, abs(own)):
        raise ConfigError(
            f"{option}: the loss of {type(model).__name__} is not the cross entropy of its hidden states times "
            f"its head ({own:.4f} instead of {ours:.4f}): it scales or caps its logits, or adds to them.\nLeave "
            f"{option} out."
        )
    # A further term may be small, so compare with the exact cross entropy of the model's own logits.
    given = outputs.logits.detach()
    plain = float(nn.functional.cross_entropy(given[0, :-1].float(), ids[0, 1:].to(given.device)))
    if outputs.loss.dtype.itemsize >= 4 and abs(own - plain) > 1e-5 * max(1.0, abs(own)):
        raise ConfigError(
            f"{option}: the loss of {type(model).__name__} is not its cross entropy alone ({own:.5f} instead of "
            f"{plain:.5f}): it has another term, such as a load-balancing loss (output_router_logits in config.json)."
            f"\nLeave {option} out."
        )


def check_logits(model: Any, inputs: dict[str, Any], option: str) -> None:
    """Check that the logits of this model are its hidden states times its head. Collective: every rank calls it.

    Raises:
        ConfigError: they differ, or cannot be computed.
    """
    if not _tried_head(model, inputs, option)[-1]:
        raise ConfigError(
            f"{option}: the logits of {type(model).__name__} are not its hidden states times its head: it scales or "
            f"caps them, or adds to them.\nLeave {option} out."
        )


def _tried_head(model: Any, inputs: dict[str, Any], option: str) -> tuple[torch.Tensor, Any, torch.Tensor, bool]:
    """A few tokens, the model's outputs for them, the inputs of its head, and whether these times the head are its
    logits."""
    why = no_plain_head(model)
    if why:
        raise ConfigError(f"{option}: {why}. Leave {option} out.")
    ids, head = _words(inputs), head_of(model)

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, head.weight, head.bias)

    def enlarge(hidden: torch.Tensor) -> torch.Tensor:
        """Scale hidden states: the small logits of an untrained model would not show a cap. A power of two causes no
        rounding."""
        largest = float(logits_of(hidden).detach().abs().max())
        scale = 2.0 ** round(math.log2(LARGE / largest)) if 0.0 < largest < LARGE else 1.0
        scaled.append(hidden * scale)
        return scaled[-1]

    scaled: list[torch.Tensor] = []
    with tried(model), _meeting(head, enlarge):
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
    if [tuple(hidden.shape[:-1]) for hidden in scaled] != [tuple(ids.shape)]:
        raise ConfigError(
            f"{option}: {type(model).__name__} does not call its head once, with a hidden state of each token. "
            f"Leave {option} out."
        )
    given = outputs.logits.detach()
    logits = logits_of(scaled[0]).detach().to(given.dtype)
    # The same operation gives the same logits; sums in half precision may differ.
    return ids, outputs, scaled[0], torch.allclose(given, logits, atol=1e-5, rtol=1e-4)


def check_weighed_loss(model: Any, inputs: dict[str, Any]) -> None:
    """Check that the loss of this model is the cross entropy of its tokens, which weights are applied to. Collective:
    every rank calls it. Raises ConfigError if it differs."""
    ids = _words(inputs)
    with tried(model):
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
    if getattr(outputs, "logits", None) is None:
        return  # Liger's, which returns no logits with a loss
    own, plain = float(outputs.loss.detach()), float(token_mean(outputs, ids).detach())
    if abs(own - plain) > (1e-4 if outputs.loss.dtype.itemsize >= 4 else 1e-2) * max(1.0, abs(own)):
        raise ConfigError(
            f"--token-weights: the loss of {type(model).__name__} is not the mean cross entropy of its tokens"
            f" ({own:.5f} instead of {plain:.5f}), and its other terms would be lost. Leave the weights out."
        )


class Weighed:
    """`check_weighed_loss`, whose result only counts if there are weights.

    Args:
        known: whether tokens have weights; None for a stream, whose rows are not known yet.
    """

    def __init__(self, known: bool | None) -> None:
        self.may_be, self._known = known is not False, known
        self._error: ConfigError | None = None

    def __call__(self, model: Any, inputs: dict[str, Any]) -> None:
        try:
            check_weighed_loss(model, inputs)
        except ConfigError as error:
            if self._known:
                raise
            self._error = error

    def have_come(self) -> None:
        """Called when weights appear: raise ConfigError if the model's loss does not support them."""
        if self._error is not None:
            raise self._error


def _words(inputs: dict[str, Any]) -> torch.Tensor:
    """A few tokens, [1, 2 * FEW], without those that stand for images, audio or videos, which are never learned."""
    ids = inputs["input_ids"]
    learnt = ids[inputs["labels"].ne(-100)] if "labels" in inputs else ids.flatten()
    words = learnt if len(learnt) else ids[:, -1]  # the end of an answer
    return words.repeat(-(-2 * FEW // len(words)))[None, : 2 * FEW]


def no_plain_head(model: Any) -> str:
    """Why `chunked_loss` cannot use the head of a model; empty if it can."""
    if not hasattr(model, "get_output_embeddings"):
        return f"{type(model).__name__} has no plain linear head over the vocabulary"
    head, name = head_of(model), type(without_adapters(model)).__name__
    if isinstance(getattr(head, "base_layer", None), nn.Linear):
        return "the head over the vocabulary carries an adapter, which a product with its weight would leave out"
    if type(head) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__name__}"
        return f"{name} has no plain linear head over the vocabulary, but {kind}"
    return ""


def head_of(model: Any) -> Any:
    """The module that computes logits; if a copy is trained beside adapters (--modules-to-save), the copy."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]
