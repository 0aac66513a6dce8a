"""Gradient accumulation with `accumulate`, and clipping by norm and by value."""

import torch
from accelerate import Accelerator
from parts import make_data, make_model


def main(batch_size):
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = make_data(40, batch_size)  # five batches of eight: the last step has two
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses, norms = [], []
    for epoch in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if epoch == 2:
                        accelerator.clip_grad_value_(model.parameters(), 0.01)
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.2)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "norms": norms}
