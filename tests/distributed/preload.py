"""What every rank of the pools needs, imported once in the process that they are forks of."""

import pytest  # noqa: F401
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed
import transformers  # noqa: F401

import shardproof  # noqa: F401

torch.set_num_threads(1)
