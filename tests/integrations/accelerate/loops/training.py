"""The first loop of Accelerate's documentation: a model, an optimizer, a loader and a scheduler."""

import torch
from accelerate import Accelerator
from parts import make_data, make_model


def main(batch_size):
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = make_data(32, batch_size)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * len(loader))

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses, rates = [], []
    model.train()
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "rates": rates}
