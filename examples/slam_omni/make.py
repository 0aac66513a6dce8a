"""Something to train on, without a download: a tiny Qwen with audio tokens, and rows, half of them spoken.

python make.py FOLDER writes a model folder with rows.jsonl and val.jsonl in it.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardproof.models.tiny import train_tokenizer

AUDIO, LAYERS = 64, 3  # tokens of the codec, and the number of tokens in a group
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def codec(text: str) -> list[list[int]]:
    """Stands in for a real codec: a group of tokens for each letter."""
    return [[(ord(letter) * (layer + 3) + layer) % AUDIO for layer in range(LAYERS)] for letter in text]


def row(chance: random.Random) -> dict:
    a, b = chance.randrange(7), chance.randrange(6)
    answer = NUMBERS[a + b]
    if chance.random() < 0.5:
        return {"question": f"What is {NUMBERS[a]} and {NUMBERS[b]}?", "answer": answer}
    return {"question": f"Say {NUMBERS[a]} and {NUMBERS[b]}", "answer": answer, "codes": codec(answer)}


folder, chance = Path(sys.argv[1]), random.Random(0)
rows = [row(chance) for _ in range(400)]
tokenizer = train_tokenizer(f"{row['question']} {row['answer']}" for row in rows)
tokenizer.add_tokens([f"<|audio_{code}|>" for code in range(AUDIO)])
config = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
    audio_vocabulary=AUDIO,
    code_layer=LAYERS,
)
torch.manual_seed(0)
Qwen3ForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
for name, part in (("rows", rows[:360]), ("val", rows[360:])):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
print(f"{folder}: {len(tokenizer)} tokens, {AUDIO} of them sound; {len(rows)} rows")
