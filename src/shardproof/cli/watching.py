"""What `verify` and `doctor` share: a run that is prepared in its own folder and observed on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli import options
from shardproof.cli.from_swift.options import split_options
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.train.folder import options_of_resumed
from shardproof.train.options.config import RunConfig
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.run import Prepared


def recipe_class(argv: Sequence[str], of_sft: type[Any], of_rlhf: type[Any]) -> type[Any]:
    """Which options a command for runs of both recipes has: those of rlhf if --rlhf-type is in its arguments, in the
    file of options that they name, or in the run that --resume names."""
    first: list[str] = []
    given = dict(split_options(options.hyphenated(argv), first))
    files = [*first[:1], *given.get("--config", [])]
    files += [word for words in (first, *given.values()) for word in words if word.endswith((".yaml", ".yml"))]
    if "--resume" in given and not {"--model", "--dataset"} & given.keys():
        resumed = (" ".join(given.get(name, [])) for name in ("--resume", "--output-dir"))
        files.append(str(options_of_resumed(*resumed) or ""))
    names = {*given}
    for path in files:
        if Path(path).suffix.lower() not in options.OF_ROWS and Path(path).expanduser().is_file():
            from shardproof.cli.yaml_file import entries

            names |= {options.flag(key) for _, key, _, value in entries(path) if value is not None}
    return of_rlhf if "--rlhf-type" in names else of_sft


def prepared_run(config: RunConfig, rows: Any) -> Prepared:
    """The run of `config` on rows already read; its output folder must be a temporary one.

    Raises:
        ConfigError, DataError: the run would be refused.
    """
    recipe = recipe_of(config)
    prepared = recipe.prepare(config, config.nproc, rows, None)
    if prepared.lock is not None:
        prepared.lock.release()
        prepared.lock = None
    return prepared


def work(prepared: Prepared, watch: Callable[..., None], args: tuple[Any, ...]) -> int:
    """The work of each rank: make the process group, then `watch(prepared, *args)`."""
    import torch

    from shardproof.zero.comm.world import start_group

    before_imports(False, prepared.config.verbose)  # a spawned process starts afresh
    after_imports(prepared.config.verbose)
    start_group()
    watch(prepared, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
