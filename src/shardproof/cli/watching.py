"""What `verify` and `doctor` share: a run that is prepared in a folder of its own and watched on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardproof.cli.quiet import after_imports, before_imports
from shardproof.train.options.config import RunConfig
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.run import Prepared


def prepared_run(config: RunConfig, rows: Any) -> Prepared:
    """The run of `config` on rows that were read; its output folder must be one that nobody misses.

    Raises:
        ConfigError, DataError: what a run would be refused for.
    """
    recipe = recipe_of(config)
    prepared = recipe.prepare(config, config.nproc, rows, None)
    if prepared.lock is not None:
        prepared.lock.release()
        prepared.lock = None
    return prepared


def work(prepared: Prepared, watch: Callable[..., None], args: tuple[Any, ...]) -> int:
    """What each rank does: make the process group, then `watch(prepared, *args)`."""
    import torch

    from shardproof.zero.comm.world import start_group

    before_imports(False, prepared.config.verbose)  # a spawned process starts from nothing
    after_imports(prepared.config.verbose)
    start_group()
    watch(prepared, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
