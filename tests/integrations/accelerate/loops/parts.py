"""The model and the data of the loops."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return Net()


def make_data(rows, batch_size, seed=1):
    """Rows in order; `batch_size` is that of one process."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)
