"""Check of the learning rate schedule of a run."""

from __future__ import annotations

from shardproof.errors import ConfigError, did_you_mean
from shardproof.train.options.config import RunConfig

# Arguments of the schedules in transformers besides the numbers of steps.
OF_SCHEDULER: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
}


def check_scheduler(config: RunConfig) -> None:
    known, given = OF_SCHEDULER.get(config.lr_scheduler, ()), config.lr_scheduler_kwargs
    for name in given:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            hint = did_you_mean(name, known) or f" --lr-scheduler {config.lr_scheduler}: {takes}."
            raise ConfigError(f"--lr-scheduler-kwargs {name}: {config.lr_scheduler} has no such argument.{hint}")
        if given[name] < 0 or (given[name] == 0 and name == "timescale"):
            least = "more than 0" if name == "timescale" else "0 or more"
            raise ConfigError(f"--lr-scheduler-kwargs {name}={given[name]:g}: it must be {least}.")
    if config.lr_scheduler == "polynomial" and config.rate <= (end := given.get("lr_end", 1e-7)):
        raise ConfigError(
            f"--lr-scheduler polynomial falls to lr_end, which is {end:g}, and --learning-rate {config.rate:g} is not"
            " above it: give a smaller --lr-scheduler-kwargs lr_end."
        )
    if config.lr_scheduler == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(given)) != 1:
        raise ConfigError(
            "--lr-scheduler cosine_with_min_lr needs one of min_lr and min_lr_rate: --lr-scheduler-kwargs min_lr=1e-6."
        )
