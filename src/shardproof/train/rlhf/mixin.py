"""What all TRL trainers have in common in `shardproof rlhf`."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from shardproof.train.adapters.reference import refer_to
from shardproof.train.model.few import few_tokens
from shardproof.train.model.left_padding import count_from_first_tokens
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.rlhf_config import SAME
from shardproof.train.rlhf.evaluation import evaluate_rows
from shardproof.train.rlhf.pictures import are_pictured
from shardproof.train.trainer import CommandMixin

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from shardproof.train.watching.report import Reporter

ADDED_UP = ("_metrics", "_stored_metrics", "_total_train_tokens")
ADAPTED = ("entropy_coef", "_last_world_entropy")  # GRPO's --trl-arguments use_adaptive_entropy, after each step


class RlhfMixin(CommandMixin):
    """The common base of all trainers. `reporter` is for those that generate, `ref_adapters` for those with a
    reference: when adapters are trained further, TRL's reference holds a copy of them."""

    def __init__(
        self, *args: Any, reporter: Reporter | None = None, ref_adapters: str | None = SAME, **kwargs: Any
    ) -> None:
        self.reporter, self._refers = reporter, functools.cache(functools.partial(refer_to, ref_adapters=ref_adapters))
        super().__init__(*args, **kwargs)
        self._refers(self.model)

    def _precompute_ref_logps(self, *args: Any) -> Any:
        """TRL also calls this while the trainer is created, and would then use its own reference."""
        self._refers(self.model)  # once, before anything is trained
        return super()._precompute_ref_logps(*args)  # type: ignore[misc]

    def kept_by_rank(self) -> dict[str, Any]:
        """What TRL's trainers accumulate between two logs, and values that they adapt."""
        added = {name: plain_of(getattr(self, name)) for name in (*ADDED_UP, *ADAPTED) if hasattr(self, name)}
        return super().kept_by_rank() | added

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        super().take_kept_by_rank(kept)
        for name in (*ADDED_UP, *ADAPTED):
            if name in kept and isinstance(kept[name], dict):
                for mode, values in kept[name].items():
                    getattr(self, name)[mode].update(values)
            elif name in kept:
                setattr(self, name, kept[name])

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        return evaluate_rows(self, dataloader, metric_key_prefix)

    def rows_behind(self, name: str, inputs: dict[str, Any], rows: int) -> int:
        """The number of rows that a metric of a micro-batch with `rows` rows is the mean of."""
        return rows

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the config.yaml of a run folder says more."""


class OfTokens(RlhfMixin):
    """A trainer that only supports tokens. With rows that have files, it is given the tokenizer and unmapped rows; the
    other inputs in a batch (`BESIDE`) bypass it on their way to the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rows, processing = [kwargs["train_dataset"], kwargs["eval_dataset"]], kwargs["processing_class"]
        kwargs["processing_class"] = tokenizer_of(processing)
        with _not_mapped([some for some in rows if some is not None and are_pictured(some)]):
            super().__init__(*args, **kwargs)
        self.processing_class = processing  # to be saved
        self._asked: set[int] = set()

    def count_from_first_tokens(self, *models: Any) -> None:
        """See the function of this name; called once for each model."""
        for model in models:
            if model is not None and id(model) not in self._asked:
                self._asked.add(id(model))
                ids = few_tokens(tokenizer_of(self.processing_class))
                count_from_first_tokens(model, ids[None].to(self.args.device))


@contextlib.contextmanager
def _not_mapped(rows: list[Any]) -> Iterator[None]:
    """Inside the context, `map` leaves these datasets unchanged: their files are read when a batch is made."""
    for some in rows:
        some.map = lambda *args, some=some, **kwargs: some
    try:
        yield
    finally:
        for some in rows:
            del some.map


def listen(model: torch.nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> RemovableHandle:
    """Change the keyword inputs of a model, until the handle is removed or its context ends."""
    return model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, change(kwargs)), prepend=True, with_kwargs=True
    )


def plain_of(value: Any) -> Any:
    """Subclasses of dict, lists and deques as plain dicts and lists; tensors on the CPU."""
    if isinstance(value, dict):
        return {name: plain_of(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain_of(item) for item in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
