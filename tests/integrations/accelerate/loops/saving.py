"""Taking the weights out: the unwrapped model, its state dict, and a folder that anybody can load."""

import os

import torch
from accelerate import Accelerator
from parts import make_data, make_model
from safetensors.torch import load_file


def main(batch_size, folder):
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_data(16, batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped) is type(make_model())
    weights = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        written = load_file(os.path.join(folder, "model.safetensors"))
        assert written.keys() == weights.keys()
        assert all(torch.equal(written[name], weights[name]) for name in weights)
    return {name: value.flatten().tolist() for name, value in weights.items()}
