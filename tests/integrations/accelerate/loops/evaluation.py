"""Evaluation between epochs: every row counts once, however many processes there are."""

import torch
from accelerate import Accelerator
from parts import make_data, make_model


def main(batch_size):
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader, eval_loader = make_data(32, batch_size), make_data(13, batch_size, seed=2)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    scores = []
    for _ in range(2):
        model.train()
        for inputs, targets in train_loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        outputs, references = [], []
        for inputs, targets in eval_loader:
            with torch.no_grad():
                logits = model(inputs)
            logits, targets = accelerator.gather_for_metrics((logits, targets))
            outputs.append(logits)
            references.append(targets)
        outputs, references = torch.cat(outputs), torch.cat(references)
        scores.append(len(references))
        scores.append(torch.nn.functional.cross_entropy(outputs, references).item())
    return {"scores": scores}
