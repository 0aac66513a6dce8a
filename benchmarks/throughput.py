"""How many tokens per second, and what fraction of its matrix rate, does an accelerator reach with each engine?

    python benchmarks/throughput.py                                         # 0.5 B, every weight trained
    python benchmarks/throughput.py --model 3b --case lora
    python benchmarks/throughput.py --model 7b --json 7b.json
    python benchmarks/throughput.py --offload --model 3b --pretend-memory 24   # larger than the card

One process and one accelerator, of any kind that torch supports; on a machine without one a tiny model runs on the CPU,
which shows that the script works but says nothing about accelerators.

Models have the shapes of Qwen2.5 and random weights. Rows are packed: `--length` tokens from `--documents` documents
that do not see each other. A step is forward and backward of `--accumulate` micro-batches of `--rows` rows, clipping
to 1.0, and AdamW. All engines compute in bf16, and keep masters, accumulated gradients and AdamW's state in fp32: 16
bytes per trained weight, plus 2 for a copy to compute with. So 7.6 B weights take 137 GB, and the rest of 139 GiB is
enough if activations are recomputed (as with `--offload`) and without the logits, which no engine ever holds
(`linear_cross_entropy`; before torch 2.13 they are recomputed in parts). `--eight-bits` (bitsandbytes' AdamW, which
does not support FSDP2) leaves room for the activations.
With LoRA (rank 16, all linear layers) the base is bf16 and frozen.

- `plain`: a bf16 model, fp32 masters beside it, gradients added to those as backward produces them: the minimal
  loop. `autocast`: what people usually write, fp32 weights under `torch.autocast`.
- `fsdp2`: `fully_shard` on each block and on the model, MixedPrecisionPolicy(bf16, reduce fp32).
- `trainer`: transformers' Trainer with `bf16=True` (autocast); `ours-trainer`: on our engine, at stage 3.
- `ours-0`, `ours-3`: the loop of `plain` with `shardproof.shard` at stages 0 and 3.
- with `--offload`: `ours-optimizer`, `ours-all` and (`--nvme FOLDER`) `ours-nvme` at stage 3; `fsdp2-offload`.

Engines do not fit into memory together, so each runs in its own process, in turn, in an order that rotates over
`--rounds`; in each it takes `--warm` steps (more than ten, because in its first ten ours compares weights after each
block, to find edits behind torch's back) and then `--steps` that are timed as one (the host may run ahead). A ratio is
the median of the ratios within rounds; the ratio to `plain` is the engine's overhead. Losses must equal those of the
first engine. An engine that does not fit is reported, and is not an error. A line is printed after each process, and
`--json` is rewritten: if a run is interrupted or an engine fails, the other results are there.

MFU is the rate of the model's floating-point operations (`qwen.py` says which, and after whom) beside that of a product
of two bf16 matrices of 8192 x 8192, which every process measures first on the same card.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from by_trainer import train_by_trainer
from card import clock, device_here, forget_peak, limit_memory, matrix_rate
from qwen import CLIP, SHAPES, WARM, Setting, blocks_of, build, operations, steps_of
from torch import Tensor, nn

LOOPS = ["plain", "autocast", "fsdp2", "trainer", "ours-0", "ours-3", "ours-trainer"]
ELSEWHERE = ["ours-3", "ours-optimizer", "ours-all", "ours-nvme", "fsdp2-offload"]
ROUNDED_ELSEWHERE = ("autocast", "trainer")  # fp32 norms, weights cast at each use: losses differ in bf16


# --- the engines: each is a function from a setting to "take one step, return the loss" ------------------

Step = Callable[[list[dict[str, Tensor]]], Tensor]


def adamw(params: Any, setting: Setting) -> torch.optim.Optimizer:
    trained = [p for p in params if p.requires_grad]
    if setting.eight_bits:
        from shardproof.train.optim.optimizers import adamw_8bit

        return adamw_8bit(trained, lr=setting.rate, weight_decay=0.0)
    return torch.optim.AdamW(trained, lr=setting.rate, weight_decay=0.0, fused=True)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], Any],
    around: Callable[[], Any] = contextlib.nullcontext,
    hold: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    """Forward and backward of each micro-batch, clipping, update. `around` wraps each forward pass, `hold` wraps all
    micro-batches but the last, whose gradients are only accumulated."""

    def step(micros: list[dict[str, Tensor]]) -> Tensor:
        losses = []
        for number, micro in enumerate(micros, 1):
            with hold() if number < len(micros) else contextlib.nullcontext():
                with around():
                    loss = model(**micro)["loss"] / len(micros)
                loss.backward()
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def plain(setting: Setting, device: torch.device) -> Step:
    model = build(setting, device, torch.bfloat16)
    pairs = [(p, p.detach().float().requires_grad_()) for p in model.parameters() if p.requires_grad]
    drawn = dict(build(setting, device, torch.float32).named_parameters())  # not rounded to bf16
    for (_, master), name in zip(pairs, (n for n, p in model.named_parameters() if p.requires_grad), strict=True):
        master.data.copy_(drawn[name])
    del drawn
    masters = [master for _, master in pairs]

    def take(p: Tensor, master: Tensor) -> None:
        master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
        p.grad = None

    for p, master in pairs:
        p.register_post_accumulate_grad_hook(functools.partial(take, master=master))
    optimizer = adamw(masters, setting)
    step = loop(model, optimizer, lambda: nn.utils.clip_grad_norm_(masters, CLIP))

    def step_and_cast(micros: list[dict[str, Tensor]]) -> Tensor:
        loss = step(micros)
        torch._foreach_copy_([p.data for p, _ in pairs], [m.data for m in masters])
        return loss

    return step_and_cast


def autocast(setting: Setting, device: torch.device) -> Step:
    model = build(setting, device, torch.float32)
    clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters(), CLIP)
    return loop(model, adamw(model.parameters(), setting), clip, lambda: torch.autocast(device.type, torch.bfloat16))


def fsdp2(setting: Setting, device: torch.device, offload: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = build(setting, device, torch.float32, torch.device("cpu") if offload else None)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in [*blocks_of(model), model]:
        fully_shard(module, **options)

    @contextlib.contextmanager
    def hold() -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
        yield
        model.set_requires_gradient_sync(True)  # type: ignore[attr-defined]

    clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters(), CLIP)
    more = {} if offload else {"hold": hold}
    return loop(model, adamw(model.parameters(), setting), clip, **more)


def ours(stage: int, offload: str | None = None) -> Callable[[Setting, torch.device], Step]:
    def make(setting: Setting, device: torch.device) -> Step:
        import shardproof

        where = f"nvme:{setting.nvme}" if offload == "nvme" else offload
        model = build(setting, device, torch.float32, torch.device("cpu") if where else None)
        shardproof.shard(model, stage, mixed_precision=torch.bfloat16, device=device, offload=where)
        clip = functools.partial(shardproof.clip_grad_norm_, model, CLIP)
        more = {} if where else {"hold": functools.partial(shardproof.no_sync, model)}
        return loop(model, adamw(model.parameters(), setting), clip, **more)

    return make


ENGINES: dict[str, Callable[[Setting, torch.device], Step]] = {
    "plain": plain,
    "autocast": autocast,
    "fsdp2": fsdp2,
    "fsdp2-offload": functools.partial(fsdp2, offload=True),
    **{f"ours-{stage}": ours(stage) for stage in (0, 3)},
    **{f"ours-{offload}": ours(3, offload) for offload in ("optimizer", "all", "nvme")},
}


def train_by_hand(setting: Setting, device: torch.device) -> dict[str, Any]:
    step = ENGINES[setting.engine](setting, device)
    of_step = steps_of(setting, device)
    losses = [step(micros) for micros in of_step[: setting.warm]]
    forget_peak()
    begin = clock()
    losses += [step(micros) for micros in of_step[setting.warm :]]
    seconds = (clock() - begin) / setting.steps
    return {"seconds": seconds, "losses": torch.stack(losses).tolist()}


# --- a process ------------------------------------------------------------------------------------------


def work(_: int, setting: Setting, folder: str) -> None:
    warnings.filterwarnings("ignore")
    from shardproof.zero.device import peak_memory

    device = device_here()
    if setting.engine.startswith("fsdp2"):
        # No backend given: one for each device. FSDP2 clips offloaded gradients on the CPU.
        dist.init_process_group(init_method=f"file://{folder}/store", rank=0, world_size=1)
    told: dict[str, Any] = {"rate": matrix_rate(device)}
    limit_memory(device, setting.memory)
    by_trainer = setting.engine.endswith("trainer")
    try:
        told |= train_by_trainer(setting, device, folder) if by_trainer else train_by_hand(setting, device)
        told["peak"] = peak_memory()
    except torch.OutOfMemoryError:
        told["fits"] = False
    Path(folder, "told.json").write_text(json.dumps(told), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def ran(setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(work, args=(setting, folder), nprocs=1)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as problem:  # the others are still measured
            return {"failed": str(problem)}
        return dict(json.loads(Path(folder, "told.json").read_text(encoding="utf-8")))


# --- the run ---------------------------------------------------------------------------------------------


def check(name: str, losses: list[float], other: str, wanted: list[float], tolerance: float) -> float:
    """The largest relative difference in loss from the engine `other`."""
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    tolerance *= 10 if {name, other} & {*ROUNDED_ELSEWHERE} else 1
    if not all(error <= tolerance for error in errors):  # nan is not
        raise SystemExit(f"{name} does not train the same model: losses {losses}, those of {other} {wanted}")
    return max(errors)


def measure(
    names: list[str], setting: Setting, rounds: int, tolerance: float, keep: Callable[[Any], None] = lambda told: None
) -> dict[str, Any]:
    """The results of each engine's processes, round by round. `keep` is called with the results so far after each."""
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    wanted: tuple[str, list[float]] | None = None
    for turn in range(rounds):
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            if any("losses" not in one for one in told[name]):
                continue  # it did not fit, or failed
            begin = time.monotonic()
            found = ran(replace(setting, engine=name))
            if "losses" in found:
                wanted = wanted or (name, found["losses"])
                try:
                    found["error"] = check(name, found["losses"], *wanted, tolerance)
                except SystemExit as problem:
                    found = {"failed": str(problem), "told": found}
            told[name].append(found)
            how = found.get("failed", "does not fit")
            how = f"{1e3 * found['seconds']:.1f} ms a step" if "losses" in found else how
            print(f"round {turn + 1}, {name}: {how} (process: {time.monotonic() - begin:.0f} s)", flush=True)
            keep(told)
    return told


def summary(told: dict[str, Any], rate: float, setting: Setting) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for name, ones in told.items():
        if not ones or any("losses" not in one for one in ones):
            lines[name] = {"fits": False, "failed": next((one["failed"] for one in ones if "failed" in one), None)}
            continue
        seconds = statistics.median(one["seconds"] for one in ones)
        lines[name] = {
            "fits": True,
            "seconds": seconds,
            "tokens_per_second": setting.tokens / seconds,
            "mfu": setting.tokens * operations(setting) / seconds / rate,
            "peak": max(one["peak"] for one in ones),
            "loss_error": max(one["error"] for one in ones),
        }
    for name, line in lines.items():
        others = {other: told[other] for other in lines if lines[other]["fits"]} if line["fits"] else {}
        line["ratio_to"] = {
            other: statistics.median(a["seconds"] / b["seconds"] for a, b in zip(told[name], those, strict=False))
            for other, those in others.items()
        }
    return lines


def show(lines: dict[str, dict[str, Any]], rate: float, setting: Setting, rounds: int) -> None:
    device = device_here()
    how = ["checkpointed, "] * setting.checkpointing + ["compiled, "] * setting.compiled
    print(
        f"\n{setting.model}, {setting.case}, {''.join(how)}{setting.attn}, "
        f"{setting.accumulate} x {setting.rows} rows of {setting.length} tokens ({setting.documents} documents), "
        f"{rounds} rounds of {setting.steps} steps on {device.type}; matrix rate {rate / 1e12:.3g} TFLOP/s"
    )
    if device.type == "cpu":
        print("No accelerator here: this shows that the script works. Its numbers mean nothing for a GPU.")
    references = [name for name in ("plain", "autocast", "fsdp2", "trainer", "fsdp2-offload") if name in lines]
    heads = ["engine", "ms", "tokens/s", "MFU, %", "peak, GB", *(f"/ {name}" for name in references), "loss error"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, line in lines.items():
        if not line["fits"]:
            rows.append([name, "failed" if line["failed"] else "does not fit", *[""] * (len(heads) - 2)])
            continue
        ratios = (f"{line['ratio_to'][other]:.3f}" if other in line["ratio_to"] else "-" for other in references)
        numbers = [f"{1e3 * line['seconds']:.1f}", f"{line['tokens_per_second']:.0f}", f"{100 * line['mfu']:.1f}"]
        rows.append([name, *numbers, f"{line['peak'] / 1e9:.2f}", *ratios, f"{line['loss_error']:.0e}"])
    print("\n" + "\n".join("| " + " | ".join(cell.ljust(8) for cell in row) + " |" for row in rows))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = device_here().type != "cpu"
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b" if here else "tiny")
    parser.add_argument("--case", choices=["full", "lora"], default="full")
    parser.add_argument("--offload", action="store_true", help="the engines with offloading")
    parser.add_argument("--nvme", metavar="FOLDER", help="with --offload: also offload to files here")
    parser.add_argument("--pretend-memory", type=float, metavar="GB", help="pretend that the accelerator has this much")
    parser.add_argument("--engines", nargs="+", choices=[*LOOPS, *ELSEWHERE[1:]], help="default: all of the case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each engine per round")
    parser.add_argument(
        "--warm", type=int, default=WARM, help="untimed steps before them; in its first ten, ours looks for edits"
    )
    parser.add_argument("--rows", type=int, help="per micro-batch (default: by the model)")
    parser.add_argument("--accumulate", type=int, help="micro-batches per step (default: by the model)")
    parser.add_argument("--length", type=int, default=4096 if here else 64, help="tokens per row")
    parser.add_argument("--documents", type=int, default=4, help="packed into a row")
    parser.add_argument("--checkpointing", choices=["yes", "no"], help="default: by the model")
    parser.add_argument("--compile", action="store_true", help="each block, with torch.compile")
    parser.add_argument("--eight-bits", action="store_true", help="AdamW's state in 8 bits (bitsandbytes)")
    parser.add_argument("--attn", default="varlen", help="attention from transformers, or ours (varlen)")
    parser.add_argument(
        "--tolerance", type=float, default=5e-3, help="relative, on losses; ten times this if rounding differs"
    )
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    shape = SHAPES[options.model]
    names = options.engines or (ELSEWHERE if options.offload else LOOPS)
    left_out = ["ours-nvme"] * (options.nvme is None) + ["fsdp2", "fsdp2-offload"] * options.eight_bits
    names = [name for name in names if name not in left_out]
    large = options.offload or (shape.checkpointing and options.case == "full" and not options.eight_bits)
    setting = Setting(
        engine="",
        model=options.model,
        case=options.case,
        rows=options.rows or shape.rows,
        accumulate=options.accumulate or shape.accumulate,
        length=options.length,
        documents=options.documents,
        checkpointing=large if options.checkpointing is None else options.checkpointing == "yes",
        compiled=options.compile,
        eight_bits=options.eight_bits,
        attn=options.attn,
        steps=options.steps,
        warm=options.warm,
        memory=options.pretend_memory,
        nvme=options.nvme,
    )
    # Buffers have many sizes, and some models nearly fill the card: expandable segments leave no gaps.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def of_rounds(told: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], float]:
        rates = [one["rate"] for ones in told.values() for one in ones if "rate" in one]
        rate = statistics.median(rates) if rates else 1.0  # the card is one
        return summary(told, rate, setting), rate

    def keep(told: dict[str, Any]) -> None:
        if options.json:
            lines, rate = of_rounds(told)
            found = {"setting": asdict(setting), "device": device_here().type, "rate": rate, "engines": lines}
            Path(options.json).write_text(json.dumps({**found, "told": told}, indent=1) + "\n", encoding="utf-8")

    lines, rate = of_rounds(measure(names, setting, options.rounds, options.tolerance, keep))
    show(lines, rate, setting, options.rounds)
    failed = [name for name, line in lines.items() if line.get("failed")]
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
