"""An optimizer for matrices, Muon or GaLore, combined with AdamW for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.train.optim.galore import GaLore

# Modules whose weights project onto a vocabulary, by the last part of their names (nothing else marks those of a
# talker).
HEAD = re.compile(r"(^|\.)\w*head(\.|$)")


class MatricesAndAdamW(torch.optim.Optimizer):
    """An optimizer for groups of matrices, each updated unsharded on the rank that owns it, and AdamW for groups with
    `elementwise`, of which each rank updates its slices.

    Args:
        params: parameters, or groups of them; AdamW updates groups with `elementwise`.
        lr: for groups without one of their own.
        betas: for AdamW.
        eps: for AdamW.
        weight_decay: for groups without one of their own.
        others: arguments of the optimizer for matrices.

    Attributes:
        name: the name of the optimizer for matrices.
        makers: what creates each of the two, by `elementwise`.

    Raises:
        ValueError: a parameter of a group without `elementwise` is not a matrix.
    """

    name: ClassVar[str]
    makers: ClassVar[dict[bool, Callable[..., torch.optim.Optimizer]]]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **others}
        super().__init__(params, {**options, "elementwise": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group["params"] = _listed(param_group["params"])
        elementwise = param_group["elementwise"] = bool(param_group.get("elementwise"))
        odd = [tuple(p.shape) for p in param_group["params"] if p.dim() != 2]
        if odd and not elementwise:
            raise ValueError(
                f"{self.name} updates matrices, but a parameter of the group has shape {odd[0]}: put it in a group "
                "with elementwise=True, which AdamW updates."
            )
        for name, value in self._part(elementwise).defaults.items():
            param_group.setdefault(name, self.defaults.get(name, value))
        super().add_param_group(param_group)

    def _part(self, elementwise: bool) -> torch.optim.Optimizer:
        """The optimizer that updates one kind of group. It is not copied or saved."""
        parts = self.__dict__.setdefault("_parts", {})
        if elementwise not in parts:
            parts[elementwise] = self.makers[elementwise]([nn.Parameter(torch.zeros(1, 1))])
        return parts[elementwise]  # type: ignore[no-any-return]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for elementwise in (False, True):
            groups = [group for group in self.param_groups if group["elementwise"] is elementwise]
            if groups:
                part = self._part(elementwise)
                part.param_groups, part.state = groups, self.state
                part.step()
        return loss


class MuonAndAdamW(MatricesAndAdamW):
    """torch's Muon for matrices.

    A matrix moves by about as much as under AdamW (arXiv 2502.16982), so that both use the same learning rate and
    weight decay.
    """

    name = "Muon"
    makers: ClassVar = {
        False: partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        True: partial(torch.optim.AdamW, fused=True),
    }


class GaLoreAndAdamW(MatricesAndAdamW):
    """GaLore for matrices."""

    name = "GaLore"
    makers: ClassVar = MuonAndAdamW.makers | {False: GaLore}


def for_matrices(
    params: Any, lr: float, model: nn.Module, *, kind: type[MatricesAndAdamW], **options: Any
) -> MatricesAndAdamW:
    """An optimizer for the trained parameters of a model.

    Args:
        params: parameters, or groups of them.
        lr: for groups without one of their own.
        model: the model that has these parameters.
        kind: the class of the optimizer.
        options: more arguments for that class.

    Raises:
        ConfigError: there is no matrix among them.
    """
    whole = {id(p) for p in matrices(model)}
    params = _listed(params)
    groups = []
    for group in params if params and isinstance(params[0], dict) else [{"params": params}]:
        listed = _listed(group["params"])
        for elementwise in (False, True):
            chosen = [p for p in listed if (id(p) not in whole) is elementwise]
            if chosen:
                groups.append({**group, "params": chosen, "elementwise": elementwise})
    if all(group["elementwise"] for group in groups):
        raise ConfigError(
            f"--optimizer {kind.name.lower()}: apart from embeddings and heads, no trained parameter is a matrix."
            f" Use adamw."
        )
    return kind(groups, lr=lr, **options)


muon = partial(for_matrices, kind=MuonAndAdamW)
galore = partial(for_matrices, kind=GaLoreAndAdamW)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that such optimizers are for: all matrices except embeddings, vocabulary heads, and single rows or
    columns."""
    models: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    heads = [head for m in models if (head := m.get_output_embeddings()) is not None]
    heads += [m for name, m in model.named_modules() if HEAD.search(name)]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    apart = {id(p) for head in heads for p in head.parameters()} | {id(table.weight) for table in tables}
    return [p for p in model.parameters() if p.dim() == 2 and min(p.shape) > 1 and id(p) not in apart]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)
