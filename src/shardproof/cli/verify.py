"""`shardproof verify`: check that a run matches a single process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli import options
from shardproof.cli.precision import check_devices
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.cli.training import parse, parser_of
from shardproof.cli.watching import recipe_class
from shardproof.doctor.config import RlhfVerifyConfig, VerifyConfig
from shardproof.errors import ConfigError, EngineError
from shardproof.train.checks.contradictions import check_whole
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.doctor.verify import Verdict

DESCRIPTION = """Run the first steps of a fine-tuning run in one process, and again at its stage and number of
processes, and report the step and parameter at which they first differ. Nothing is saved. Exit code 1 if they differ.
With --rlhf-type, given or in run.yaml, it is a run of 'shardproof rlhf' and takes its options."""

Config = VerifyConfig | RlhfVerifyConfig


def parser() -> options.Parser:
    """The option table of the command."""
    made = parser_of(VerifyConfig, DESCRIPTION, name="verify")
    made.add_argument("--rlhf-type", metavar="TEXT", help="verify a run of 'shardproof rlhf', with its options")
    return made


def taken_at_once(config: Any, batch: Any) -> dict[str, int]:
    """Options that make one process take the rows of all ranks at once, if the loss depends on all of them.

    Raises:
        ConfigError: runs of this kind cannot be compared.
    """
    together, of_all = {"sequence_parallel": 1}, config.recipe == "embedding"  # a row's negatives come from all ranks
    if isinstance(config, RlhfVerifyConfig):
        from shardproof.doctor.checks.rlhf_checks import TOGETHER, check_verifiable

        check_verifiable(config)
        of_all = config.rlhf_type in TOGETHER
    return together | ({"per_device_batch_size": batch.micro * batch.readers} if of_all else {})


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from shardproof.cli.hub import run_is_here
    from shardproof.cli.processes import launch

    config, _ = parse(recipe_class(argv, VerifyConfig, RlhfVerifyConfig), DESCRIPTION, argv, name="verify")
    if launch.outer_world() is not None:
        raise ConfigError("shardproof verify starts its own processes: run it without torchrun, with --nproc.")
    check_whole(config, "verify")
    check_devices(config.nproc)
    recipe = recipe_of(config)
    batch = recipe.check(config, config.nproc)
    together = taken_at_once(config, batch)
    before_imports(run_is_here(config), config.verbose)
    rows, _ = recipe.read(config)
    launch.use_threads(1)  # a pool of OpenMP threads does not survive a fork
    after_imports(config.verbose)
    from shardproof.cli.watching import prepared_run, work
    from shardproof.doctor.observe import short_run
    from shardproof.doctor.verify import compare, read_verdict, write_reference

    with tempfile.TemporaryDirectory(prefix="shardproof-verify-") as folder:
        alone = short_run(
            config,
            batch,
            1,
            config.steps,
            str(Path(folder) / "alone"),
            stage=0,
            keep_gathered=0.0,
            shard_group=None,
            **together,
        )
        many = short_run(config, batch, config.nproc, config.steps, str(Path(folder) / "together"))
        os.environ["OMP_NUM_THREADS"] = "1"  # another number of threads changes the order of sums
        runs = [prepared_run(each, rows) for each in (alone, many)]
        if launch.forks():
            recipe.import_libraries(config)
        jobs = (
            (runs[0], 1, (write_reference, (folder,))),
            (runs[1], config.nproc, (compare, (folder,))),
        )
        for prepared, nproc, (watch, args) in jobs:
            code = launch.launch(work, (prepared, watch, args), nproc, debug=config.debug, apart=True)
            if code:
                return code
        verdict = read_verdict(folder)
    return _say(config, verdict, str(batch))


def _say(config: Config, verdict: Verdict, batch: str) -> int:
    from shardproof.doctor.verify import Allowed

    print(f"one process and stage {config.stage} on {config.nproc}: {batch}")
    for step, (alone, together) in enumerate(verdict.losses, 1):
        print(f"step {step}  loss {alone:.6f} and {together:.6f}")
    apart, out = verdict.parted, ", ".join(map(str, verdict.left_out))
    if out:
        print(f"The loss scaler skipped step {out} in both runs, and halved the scale each time.")
    if apart:
        print(
            f"The loss scaler skipped step {apart} in only one of the two runs: gradients reach the limit of fp16.\n"
            "From then on the weights come from different steps and are not compared. The stage is not at fault."
        )
    if not verdict.steps and not verdict.differences:
        instead = "--precision bf16 or fp32" if apart else f"more steps, --steps {len(verdict.losses) + 16}"
        raise EngineError(f"The two runs have no step that can be compared. Compare with {instead}.")
    allowed = Allowed.by(config, 1)
    how = (
        "bit for bit"
        if getattr(config, "deterministic", False)
        else f"to {allowed.element:g} of the largest value"
        + (f", losses to {allowed.loss:g} of them" if allowed.element else "")
    )
    if not verdict.differences:
        print(f"equal {how}: gradients and weights of {verdict.compared} parameters in {verdict.steps} steps")
        return 0
    if verdict.dropout:
        more = f" and {len(verdict.dropout) - 1} more" if len(verdict.dropout) > 1 else ""
        print(f"random, so any two runs differ (compare with it set to 0): {verdict.dropout[0]}{more}")
    first, *others = verdict.differences
    print(f"they differ ({how} was asked for). First at {first}")
    for other in others[:4]:
        print(f"  then at {other}")
    return 1
