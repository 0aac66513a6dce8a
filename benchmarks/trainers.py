"""How long is a step of transformers' Trainer on each engine?

    python benchmarks/trainers.py                                # Llama of 34 M parameters, 2 ranks
    python benchmarks/trainers.py --engines ddp deepspeed-3 ours-3 --rounds 3 --world 4

Trainer keeps one engine for the life of a process. So each engine gets its own processes, in turn, for `--rounds`
rounds; in each it trains the same model from the same weights on the same rows, and its losses must equal those of one
process. A time is the median over steps except the first three; a ratio is the median of the ratios within rounds.

Accelerate enables FSDP only on accelerators: on a CPU there is no FSDP2 under Trainer, and the script says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step_time import leave_out

ENGINES = ["alone", "ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3", "ours-0", "ours-1", "ours-2", "ours-3"]
REFERENCES = ["ddp", "fsdp2", "deepspeed-3"]
WARM = 3
SIZES = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "34m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
}


class Rows(torch.utils.data.Dataset):
    """Random tokens: (length,) for each row, the same in every process."""

    def __init__(self, count: int, length: int) -> None:
        source = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(2, 8192, (count, length), generator=source)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def arguments(engine: str, options: argparse.Namespace, folder: str, world: int) -> Any:
    from transformers import TrainingArguments

    family, _, stage = engine.partition("-")
    more: dict[str, Any] = {"use_cpu": not torch.accelerator.is_available()}
    if family == "deepspeed":
        more["use_cpu"] = False  # otherwise Accelerate does not use DeepSpeed
        more["accelerator_config"] = {"use_configured_state": True}  # made by `meet_under_deepspeed`
        more["deepspeed"] = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 5_000_000},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
    if family == "fsdp2":
        more["fsdp"] = "full_shard"
        more["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=options.batch * (options.world // world),
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **more,
    )


def meet_under_deepspeed() -> None:
    """Accelerate has no backend for DeepSpeed on a CPU, so each process would train by itself."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="nccl" if torch.accelerator.is_available() else "gloo")


def worker(rank: int, engine: str, options: argparse.Namespace, folder: str, port: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = 1 if engine == "alone" else options.world
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["DS_ACCELERATOR"] = "cpu" if not torch.accelerator.is_available() else "cuda"
    import transformers

    transformers.logging.set_verbosity_error()
    if engine.startswith("deepspeed"):
        meet_under_deepspeed()
    arguments_of_trainer = arguments(engine, options, folder, world)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if world > 1:
                dist.barrier()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter() - self.started)

    kind, extra = transformers.Trainer, {}
    if engine.startswith("ours"):
        from shardproof.integrations.transformers import sharded

        kind, extra = sharded(transformers.Trainer), {"stage": int(engine[-1])}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=8192, max_position_embeddings=512, **SIZES[options.model])
    model = transformers.LlamaForCausalLM(config)
    rows = Rows(options.steps * options.batch * options.world, options.length)
    trainer = kind(model=model, args=arguments_of_trainer, train_dataset=rows, callbacks=[Clock()], **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    if rank == 0:
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        with open(f"{folder}/told.json", "w") as file:
            json.dump({"times": times[WARM:], "losses": losses}, file)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def ran(engine: str, options: argparse.Namespace, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(engine, options, folder, port), nprocs=1 if engine == "alone" else options.world)
        with open(f"{folder}/told.json") as file:
            return json.load(file)


def available(names: list[str]) -> list[str]:
    from importlib.util import find_spec

    reasons = {}
    if find_spec("deepspeed") is None:
        reasons["deepspeed"] = "DeepSpeed is not installed (make peers)"
    if not torch.accelerator.is_available():
        reasons["fsdp2"] = "Accelerate turns FSDP on for accelerators only"
    return leave_out(names, reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="steps of each engine per round")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--model", choices=list(SIZES), default="34m")
    parser.add_argument("--batch", type=int, default=2, help="rows per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per row")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, on the losses, which Trainer rounds")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    options = parser.parse_args()
    if options.steps < WARM + 2:
        parser.error(f"--steps must be at least {WARM + 2}")
    engines = available(options.engines)
    wanted = ran("alone", options, 0)["losses"]
    medians: dict[str, list[float]] = {name: [] for name in engines}
    port = 20_000 + os.getpid() % 20_000
    for turn in range(options.rounds):
        for at in range(len(engines)):
            name = engines[(at + turn) % len(engines)]
            port += 1
            told = ran(name, options, port)
            error = max(abs(a - b) / abs(b) for a, b in zip(told["losses"], wanted, strict=True))
            if not error <= options.tolerance:
                raise SystemExit(f"{name} does not train the same model: {told['losses']}, one process {wanted}")
            medians[name].append(statistics.median(told["times"]))
    references = [name for name in REFERENCES if name in engines]
    print(
        f"\ntransformers' Trainer, {options.model}, {options.world} ranks of one thread ('alone': one process on the"
        f" whole batch), {options.batch} x {options.length} tokens per rank, {options.rounds} rounds of"
        f" {options.steps} steps\n"
    )
    rows = [["engine", "ms", *(f"/ {name}" for name in references)], ["---", "---:", *("---:" for _ in references)]]
    for name, times in medians.items():
        ratios = [statistics.median(a / b for a, b in zip(times, medians[r], strict=True)) for r in references]
        rows.append([name, f"{1e3 * statistics.median(times):.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    for row in rows:
        print("| " + " | ".join(cell.ljust(11) for cell in row) + " |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "medians_s": medians}, file, indent=1)


if __name__ == "__main__":
    main()
