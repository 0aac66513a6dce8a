"""Plain PyTorch at any stage: torchrun --nproc-per-node 2 examples/plain_loop.py --stage 3

It prints the same numbers on 1, 2, 4 and 8 processes, at every stage."""

import argparse
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardproof
from shardproof.data.encoding.encode import collate, encode_rows
from shardproof.data.rows import read_rows
from shardproof.models.tiny import build_tiny

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=3)
stage = parser.parse_args().stage
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

rows = read_rows(["stdlib#500"])
with tempfile.TemporaryDirectory() as folder:
    build_tiny(folder, rows.texts())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
data = encode_rows(rows, tokenizer, max_length=128)

model = shardproof.shard(model, stage=stage)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    start = step * 8 % (len(data) - 8)
    rows_of_step = [data[start + i] for i in range(8)]
    mine = rows_of_step[rank * 8 // world_size : (rank + 1) * 8 // world_size]
    batch = collate(mine, tokenizer.pad_token_id)
    # Gradients are averaged over ranks, so a rank divides the sum over its tokens by its share of those of all ranks.
    tokens = sum(label != -100 for row in rows_of_step for label in row["labels"][1:])
    inputs = {name: value.to(model.device) for name, value in batch.items()}
    loss = model(**inputs, num_items_in_batch=tokens / world_size).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world_size
    if world_size > 1:
        torch.distributed.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1}  loss {mean.item():.4f}  gradient norm {norm.item():.3f}", flush=True)
