"""Accumulation by hand: `no_sync` for all micro-batches but the last."""

import contextlib

import torch
from accelerate import Accelerator
from parts import make_data, make_model


def main(batch_size):
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_data(32, batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for number, (inputs, targets) in enumerate(loader):
        last = number % 2 == 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / 2
            accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses}
