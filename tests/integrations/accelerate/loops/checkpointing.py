"""Saving the whole state in the middle of an epoch, and going on from there."""

import torch
from accelerate import Accelerator
from parts import make_data, make_model


class Counter:
    """Something of one's own with a state."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main(batch_size, folder, stop_at, resume_at):
    accelerator = Accelerator()
    torch.manual_seed(3)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = make_data(32, batch_size)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    if resume_at:
        accelerator.load_state(folder)
    losses, rates, step = [], [], resume_at
    for epoch in range(resume_at // len(loader), 2):
        model.train()
        batches = loader
        if resume_at and epoch == resume_at // len(loader):
            batches = accelerator.skip_first_batches(loader, resume_at % len(loader))
        for inputs, targets in batches:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            counter.value += 1
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            step += 1
            if step == stop_at:
                accelerator.save_state(folder)
                return {"losses": losses, "rates": rates}
    return {"losses": losses, "rates": rates, "registered": [counter.value]}
