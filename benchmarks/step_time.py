"""How long is a training step under each engine? All of them in one run, in the same processes.

    python benchmarks/step_time.py                                   # 36 M parameters, 2 ranks
    python benchmarks/step_time.py --engines ddp fsdp2 ours-3 --rounds 20
    python benchmarks/step_time.py --model 150m --engines fsdp2 deepspeed-3 ours-3
    python benchmarks/step_time.py --case lora                       # adapters on a frozen base
    python benchmarks/step_time.py --case checkpointed               # activations recomputed

Every engine holds its own copy of the same decoder (same weights, same data, fp32, AdamW).
First each must match one process on the full batch for a few steps, loss by loss; only
engines that agree are timed, after a few more steps: ours compares weights in its first ten (to find edits in
forward), and allocators settle. Then, in every round, each engine runs one step (forward, backward, optimizer),
in a new random order, so that a slow moment of the machine affects all equally, and no engine always follows the same
one: whichever comes after FSDP2 pays for memory that FSDP2 has given back. A ratio is the median of the ratios within
the rounds.

`alone` is one rank's share of the work without any communication: the same micro-batch, a full
model and a full optimizer per process, all ranks at once. It is a lower bound for stage 0 and DDP; a
sharded optimizer step can beat it.

DeepSpeed is optional (`pip install shardproof[peers]`); without it its rows are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from decoder import SHAPES, Group, build, shape_of
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]
PEERS = ["alone", "ddp", "ddp-views", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
OURS = ["ours-0", "ours-1", "ours-2", "ours-3"]
REFERENCES = ["fsdp2", "ddp", "ddp-views", "deepspeed-3", "ours-0"]


@dataclass(frozen=True)
class Setting:
    model: str
    case: str
    together: int
    world: int
    batch: int
    length: int
    rounds: int
    check: int
    warm: int
    tolerance: float
    optimizer: str
    clip: float | None
    engines: tuple[str, ...]
    store: str


@dataclass
class Timing:
    """Seconds of each round: the slowest rank's wall-clock time, and the mean CPU time of a rank."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


# --- The engines: each is a function from a setting to "run one step, return the local loss" ---


def model_of(setting: Setting) -> nn.Module:
    return build(setting.model, case=setting.case, together=setting.together)


def adamw(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    switch = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, **switch[setting.optimizer])


def plain_step(model: nn.Module, setting: Setting) -> Step:
    """The usual loop, for engines that do not change it."""
    optimizer = adamw(model, setting)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def alone(setting: Setting) -> Step:
    return plain_step(model_of(setting), setting)


def ddp(**options: bool) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        return plain_step(nn.parallel.DistributedDataParallel(model_of(setting), **options), setting)

    return make


def fsdp2(reshard: bool | None = None) -> Callable[[Setting], Step]:
    """`reshard`: `reshard_after_forward` of the blocks."""

    def make(setting: Setting) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = model_of(setting)
        mesh = init_device_mesh("cpu", (setting.world,))
        for block in model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        return plain_step(model, setting)

    return make


def ours(stage: int, kept: float = 0.0) -> Callable[[Setting], Step]:
    """`kept`: the fraction of the blocks' gathered weights that may stay from one use to the next."""

    def make(setting: Setting) -> Step:
        import shardproof

        model, units = model_of(setting), [Group] if setting.together > 1 else None
        blocks = sum(4 * p.numel() for p in model.layers.parameters())
        return plain_step(shardproof.shard(model, stage, units=units, keep_gathered=int(kept * blocks)), setting)

    return make


def deepspeed(stage: int) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        import deepspeed

        model = model_of(setting)
        config = {
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": DEEPSPEED_BUCKET},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": setting.clip or 0.0,  # unset, DeepSpeed clips to 1.0
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model, setting), config=config, dist_init_required=False
        )

        def step(tokens: Tensor) -> Tensor:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return make


# 20 MB of fp32, the fastest of 5e6, 2e7, 1e8 here. The default (5e8) would set 2 GB aside per copy.
DEEPSPEED_BUCKET = 5_000_000

ENGINES: dict[str, Callable[[Setting], Step]] = {
    "alone": alone,
    "ddp": ddp(),
    "ddp-views": ddp(gradient_as_bucket_view=True),
    "fsdp2": fsdp2(),
    "fsdp2-kept": fsdp2(reshard=False),
    **{f"deepspeed-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"ours-{stage}": ours(stage) for stage in (0, 1, 2, 3)},
    "ours-3-half": ours(3, kept=0.5),
    "ours-3-kept": ours(3, kept=1.1),  # each is padded
}
USUAL = [name for name in ENGINES if not name.endswith(("-half", "-kept"))]


# --- The run ---


def batch(setting: Setting, at: int) -> Tensor:
    """The full batch of step `at`, the same on every rank: (world * batch, length + 1)."""
    source = torch.Generator().manual_seed(1000 + at)
    size = (setting.world * setting.batch, setting.length + 1)
    return torch.randint(shape_of(setting.model).vocabulary, size, generator=source)


def share(setting: Setting, at: int, rank: int) -> Tensor:
    return batch(setting, at)[rank * setting.batch : (rank + 1) * setting.batch]


def mean(value: Tensor) -> float:
    value = value.detach().clone().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def follow(step: Step, setting: Setting, rank: int) -> list[float]:
    return [mean(step(share(setting, at, rank))) for at in range(setting.check)]


def reference(setting: Setting) -> list[float]:
    """Losses of one process on the full batch."""
    step = alone(setting)
    return [step(batch(setting, at)).item() for at in range(setting.check)]


def prepare(setting: Setting, rank: int) -> tuple[dict[str, Step], dict[str, float]]:
    """Build every engine and compare it with the reference.

    Returns the steps, and each engine's largest relative distance in loss."""
    wanted = reference(setting)
    steps: dict[str, Step] = {}
    errors: dict[str, float] = {}
    for name in setting.engines:
        steps[name] = ENGINES[name](setting)
        if name == "alone":  # sees only one rank's data: nothing to compare
            follow(steps[name], setting, rank)
            continue
        found = follow(steps[name], setting, rank)
        errors[name] = max(abs(f - w) / abs(w) for f, w in zip(found, wanted, strict=True))
        if not errors[name] <= setting.tolerance:  # also when it is NaN
            raise SystemExit(f"{name} does not train the same model: losses {found}, one process {wanted}")
    return steps, errors


def measure(steps: dict[str, Step], setting: Setting, rank: int) -> dict[str, Timing]:
    timings = {name: Timing() for name in steps}
    names, known = list(steps), setting.check + setting.warm
    for step in steps.values():
        for at in range(setting.check, known):
            step(share(setting, at, rank))
    for turn in range(setting.rounds):
        tokens = share(setting, known + turn, rank)
        for name in random.Random(turn).sample(names, len(names)):  # the same on every rank
            gc.collect()
            dist.barrier()
            processor, start = time.process_time(), time.perf_counter()
            steps[name](tokens)
            took = torch.tensor([time.perf_counter() - start, time.process_time() - processor])
            slowest = took[:1].clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(took)
            timings[name].wall.append(slowest.item())
            timings[name].processor.append(took[1].item() / setting.world)
    return timings


def paired(of: Timing, to: Timing) -> float:
    return statistics.median(a / b for a, b in zip(of.wall, to.wall, strict=True))


def show(timings: dict[str, Timing], errors: dict[str, float], setting: Setting) -> None:
    references = [name for name in REFERENCES if name in timings]
    print(
        f"\n{setting.model}, {setting.case}, {setting.world} ranks of {torch.get_num_threads()} thread, "
        f"{setting.batch} x {setting.length} tokens per rank, fp32, AdamW ({setting.optimizer}), "
        f"median of {setting.rounds} rounds; losses checked over {setting.check} steps,"
        f" {setting.warm} more not timed\n"
    )
    heads = ["engine", "ms", "quartiles", "cpu ms", *(f"/ {name}" for name in references), "loss error"]
    rows = []
    for name, timing in timings.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(timing.wall, n=4, method="inclusive"))
        rows.append(
            [
                name,
                f"{middle:.0f}",
                f"{low:.0f}-{high:.0f}",
                f"{1e3 * statistics.median(timing.processor):.0f}",
                *(f"{paired(timing, timings[other]):.2f}" for other in references),
                f"{errors[name]:.0e}" if name in errors else "-",
            ]
        )
    for row in [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]:
        print("| " + " | ".join(cell.ljust(11) for cell in row) + " |")


def as_json(timings: dict[str, Timing], errors: dict[str, float], setting: Setting) -> str:
    engines = {
        name: {
            "wall_s": timing.wall,
            "processor_s": timing.processor,
            "median_s": statistics.median(timing.wall),
            "loss_error": errors.get(name),
            "ratio_to": {o: paired(timing, timings[o]) for o in REFERENCES if o in timings},
        }
        for name, timing in timings.items()
    }
    keys = ("model", "case", "together", "world", "batch", "length", "rounds", "optimizer", "clip")
    return json.dumps({**{key: getattr(setting, key) for key in keys}, "engines": engines}, indent=1)


def worker(rank: int, setting: Setting, json_path: str | None) -> None:
    quiet()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.world))
    dist.init_process_group("gloo", init_method=f"file://{setting.store}", rank=rank, world_size=setting.world)
    steps, errors = prepare(setting, rank)
    timings = measure(steps, setting, rank)
    if rank == 0:
        show(timings, errors, setting)
        if json_path:
            with open(json_path, "w") as file:
                file.write(as_json(timings, errors, setting) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def quiet() -> None:
    """DeepSpeed logs every setting, and torch warns about renamed functions: neither is a result."""
    import logging

    warnings.filterwarnings("ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def leave_out(names: list[str], reasons: dict[str, str]) -> list[str]:
    """`names` without the engines of the families in `reasons`; prints which are left out, and why."""
    for family, reason in reasons.items():
        left_out = [name for name in names if name.startswith(family)]
        if left_out:
            print(f"left out: {', '.join(left_out)}. {reason}", file=sys.stderr)
            names = [name for name in names if name not in left_out]
    return names


def available(names: list[str]) -> list[str]:
    """Those of `names` that can run here."""
    from importlib.util import find_spec

    missing = {}
    if find_spec("deepspeed") is None:
        missing["deepspeed"] = "DeepSpeed is not installed (pip install shardproof[peers])"
    if find_spec("shardproof") is None:
        missing["ours"] = "shardproof is not installed (pip install -e .)"
    return leave_out(names, missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=USUAL)
    parser.add_argument("--model", default="36m", help=f"{', '.join(SHAPES)}, or WIDTHxLAYERS")
    parser.add_argument("--case", choices=["full", "lora", "checkpointed"], default="full")
    parser.add_argument("--together", type=int, default=1, help="blocks that are gathered together")
    parser.add_argument("--batch", type=int, default=2, help="rows per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per row")
    parser.add_argument("--optimizer", choices=["plain", "foreach", "fused"], default="fused")
    parser.add_argument("--clip", type=float, help="clip the gradient to this norm")
    parser.add_argument("--check", type=int, default=3, help="steps whose losses must agree before timing")
    parser.add_argument("--warm", type=int, default=9, help="further untimed steps of each engine")
    parser.add_argument("--tolerance", type=float, default=2e-5, help="relative, on those losses")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = parser.parse_args()
    engines = available(args.engines)
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            model=args.model,
            case=args.case,
            together=args.together,
            world=args.world,
            batch=args.batch,
            length=args.length,
            rounds=args.rounds,
            check=args.check,
            warm=args.warm,
            tolerance=args.tolerance,
            optimizer=args.optimizer,
            clip=args.clip,
            engines=tuple(engines),
            store=f"{folder}/store",
        )
        mp.spawn(worker, args=(setting, args.json), nprocs=args.world)


if __name__ == "__main__":
    main()
