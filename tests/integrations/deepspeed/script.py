"""A training script as it is written for DeepSpeed. Tests run it as it stands, and with the import changed."""

import argparse
import json
import os

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stop_after", type=int, default=6)
parser.add_argument("--save", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--folder", required=True)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
with open(args.deepspeed_config) as file:
    ds_config = json.load(file)
zero3 = ds_config["zero_optimization"]["stage"] == 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x, y):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=zero3):
    model = Net()
if zero3:  # what zero.Init made in slices starts from the values of rank 0
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        pass
with deepspeed.zero.GatheredParameters([model.head.weight, model.head.bias], modifier_rank=0):
    if rank == 0:
        nn.init.ones_(model.head.weight)
        nn.init.zeros_(model.head.bias)

engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())


def micro_batch(number):
    """The rows of one micro-batch on all ranks; this rank takes its share."""
    generator = torch.Generator().manual_seed(1000 + number)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


start = 0
if args.resume:
    _, client_state = engine.load_checkpoint(args.folder)
    start = client_state["step"]

losses, norms, rates = [], [], []
for step in range(start, args.stop_after):
    for micro in range(engine.gradient_accumulation_steps()):
        x, y = micro_batch(step * engine.gradient_accumulation_steps() + micro)
        loss = engine(x, y)
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            rates.append(engine.get_lr()[0])
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        losses.append(total.item() / ranks)
    norms.append(float(engine.get_global_grad_norm() or 0.0))

if args.save:
    engine.save_checkpoint(args.folder, client_state={"step": args.stop_after})
if rank == 0:
    name = "resumed.json" if args.resume else "record.json"
    with open(os.path.join(args.folder, name), "w") as file:
        json.dump({"losses": losses, "norms": norms, "rates": rates, "steps": engine.global_steps}, file)
