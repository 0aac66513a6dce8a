"""The steps of throughput.py, run by transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from card import clock, forget_peak
from qwen import CLIP, Setting, batches, build
from torch import Tensor


def train_by_trainer(setting: Setting, device: torch.device, folder: str) -> dict[str, Any]:
    """The same steps with transformers' Trainer, unmodified if `engine` is "trainer"."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, more, times = transformers.Trainer, {}, []
    if setting.engine == "ours-trainer":
        from shardproof.integrations.transformers import sharded

        kind, more = sharded(transformers.Trainer), {"stage": 3}

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == setting.warm:
                forget_peak()
                times.append(clock())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(clock())

    losses: list[Tensor] = []

    class Noted(kind):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        bf16=True,
        optim="adamw_bnb_8bit" if setting.eight_bits else "adamw_torch_fused",
        use_cpu=device.type == "cpu",
        max_steps=setting.warm + setting.steps,
        per_device_train_batch_size=setting.rows,
        gradient_accumulation_steps=setting.accumulate,
        learning_rate=setting.rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    micros = batches(setting)
    rows = [{name: value[i] for name, value in micro.items()} for micro in micros for i in range(setting.rows)]
    trainer = Noted(
        model=build(setting, device, torch.float32),
        args=arguments,
        train_dataset=rows,
        callbacks=[Clock()],
        data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
        **more,
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # the order of the other engines
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    sums = torch.stack(losses).view(-1, setting.accumulate).sum(1)
    return {"seconds": (times[1] - times[0]) / setting.steps, "losses": sums.tolist()}
