"""A script for torchrun: TRL's own SFTTrainer with our mixin in front of it."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from shardproof.integrations.transformers import ShardedTrainerMixin


class Sharded(ShardedTrainerMixin, SFTTrainer):
    pass


if __name__ == "__main__":
    folder, rows, out, stage, micro = sys.argv[1:]
    messages = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    messages = (messages * 2)[:24]  # whole steps only: accelerate fills up the last one in its own way
    args = SFTConfig(
        output_dir=out,
        max_steps=3,
        per_device_train_batch_size=int(micro),
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = Sharded(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(messages),
        args=args,
        stage=int(stage),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with open(f"{out}/losses.json", "w", encoding="utf-8") as file:
            json.dump(losses, file)
