"""`shardproof verify`: whether a run gives the numbers of one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.cli import options
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.cli.training import parse, parser_of
from shardproof.doctor.config import VerifyConfig
from shardproof.errors import ConfigError
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.doctor.verify import Verdict

DESCRIPTION = """Run the first steps of a fine-tuning run in one process and at its stage and number of processes, from
the same options, and say at which step and parameter they first differ. Nothing is saved. Exit code 1 if they do."""


def parser() -> options.Parser:
    """The option table of the command."""
    return parser_of(VerifyConfig, DESCRIPTION, name="verify")


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from shardproof.cli import launch
    from shardproof.cli.hub import needs_network

    config, _ = parse(VerifyConfig, DESCRIPTION, argv, name="verify")
    if launch.outer_world() is not None:
        raise ConfigError("shardproof verify starts its own processes: run it without torchrun, with --nproc.")
    recipe = recipe_of(config)
    batch = recipe.check(config, config.nproc)
    before_imports(not any(needs_network(model) for model in config.models), config.verbose)
    rows, _ = recipe.read(config)
    launch.use_threads(1)  # a pool of OpenMP threads does not survive a fork
    after_imports(config.verbose)
    from shardproof.cli.watching import prepared_run, work
    from shardproof.doctor.observe import short_run
    from shardproof.doctor.verify import compare, read_verdict, write_reference

    with tempfile.TemporaryDirectory(prefix="shardproof-verify-") as folder:
        alone = short_run(config, batch, 1, config.steps, str(Path(folder) / "alone"), stage=0, sequence_parallel=1)
        together = short_run(config, batch, config.nproc, config.steps, str(Path(folder) / "together"))
        os.environ["OMP_NUM_THREADS"] = "1"  # another number of threads adds in another order
        runs = [prepared_run(each, rows) for each in (alone, together)]
        if launch.forks():
            recipe.import_libraries(config)
        jobs = (
            (runs[0], 1, (write_reference, (folder,))),
            (runs[1], config.nproc, (compare, (folder, config.tolerance, config.deterministic))),
        )
        for prepared, nproc, (watch, args) in jobs:
            code = launch.launch(work, (prepared, watch, args), nproc, debug=config.debug, apart=True)
            if code:
                return code
        verdict = read_verdict(folder)
    return _say(config, verdict, str(batch))


def _say(config: VerifyConfig, verdict: Verdict, batch: str) -> int:
    print(f"one process and stage {config.stage} on {config.nproc}: {batch}")
    for step, (alone, together) in enumerate(verdict.losses, 1):
        print(f"step {step}  loss {alone:.6f} and {together:.6f}")
    if verdict.dropout:
        print(f"{len(verdict.dropout)} modules drop at random ({verdict.dropout[0]}): runs differ by chance there")
    how = "bit for bit" if config.deterministic else f"to {config.tolerance:g} of the largest value"
    if not verdict.differences:
        print(f"equal {how}: gradients and weights of {verdict.compared} parameters in {verdict.steps} steps")
        return 0
    first, *others = verdict.differences
    print(f"they differ ({how} was asked for). First at {first}")
    for other in others[:4]:
        print(f"  then at {other}")
    return 1
