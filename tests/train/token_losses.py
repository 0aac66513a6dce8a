"""What tests of losses of tokens share: small inputs, and how a loss and its gradients are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (2, 300, 8) and a head (50, 8) in float64, and labels of which the first 40 are not learnt."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 300, 8, generator=draw, dtype=torch.float64).requires_grad_()
    head = torch.randn(50, 8, generator=draw, dtype=torch.float64).requires_grad_()
    labels = torch.randint(50, (2, 300), generator=draw)
    labels[:, :40] = -100
    return hidden, head, labels


def assert_same(
    loss: torch.Tensor, wanted: torch.Tensor, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """The loss and its gradients. Whole logits are taken in float32, as the plain loss takes them."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss.double(), wanted.double(), **tolerance)
    for got, right in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        torch.testing.assert_close(got, right, **tolerance)
