"""A plugin with losses that are not finite at times. A step is one micro-batch of each process."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import shardproof

steps = 0


def plain(outputs, labels, items):
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / items


@shardproof.register_loss("nan_of_a_long_row")
def nan_of_a_long_row(outputs, labels, num_items_in_batch):
    loss = plain(outputs, labels, num_items_in_batch)
    return loss * float("nan") if (labels != -100).sum(1).max() > 150 else loss


def shown_as_nan_in(*bad):
    """In these steps the value is NaN, and the gradients are as always."""

    def loss(outputs, labels, num_items_in_batch):
        global steps
        steps += torch.is_grad_enabled()
        found = plain(outputs, labels, num_items_in_batch)
        return found + float("nan") if torch.is_grad_enabled() and steps in bad else found

    return loss


shardproof.register_loss("nan_once")(shown_as_nan_in(3))
shardproof.register_loss("nan_in_the_end")(shown_as_nan_in(5))


@shardproof.register_loss("too_large_once")
def too_large_once(outputs, labels, num_items_in_batch):
    """For fp16: the loss scale of the beginning is too large for it, and half of it still."""
    global steps
    steps += torch.is_grad_enabled()
    loss = plain(outputs, labels, num_items_in_batch)
    return loss + (loss - loss.detach()) * 1e5 if steps in (2, 5) else loss
