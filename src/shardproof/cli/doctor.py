"""`shardproof doctor`: report what would go wrong, before anything is trained."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli import options
from shardproof.cli.processes.machines import Machines, Start, meet, several
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.cli.training import meeting, parse, parser_of
from shardproof.cli.watching import recipe_class
from shardproof.doctor.checks.check import Check, as_json, option_in, show
from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
from shardproof.errors import ConfigError, ShardproofError
from shardproof.train.checks.contradictions import check_whole
from shardproof.train.options.rlhf_config import REWARDED
from shardproof.train.resume import with_rows_a_step
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.options.config import Batch

DESCRIPTION = """Check the machine, rows, model and memory of a fine-tuning run, then run two steps of it on its ranks.
Each problem is shown with its cause and the option to change. Exit code 1 if there is one. With --rlhf-type, given or
in run.yaml, it is a run of 'shardproof rlhf' and takes its options."""

Config = DoctorConfig | RlhfDoctorConfig
Steps = Callable[[Any, str], int]
UNTRIED = ("trained", "checkpoint", "rows to evaluate on")  # checks that may fail without ruling out a trial


def parser() -> options.Parser:
    """The option table of the command."""
    made = parser_of(DoctorConfig, DESCRIPTION, name="doctor")
    made.add_argument("--json", action="store_true", help="print one object")  # `run` removes it from the arguments
    made.add_argument("--rlhf-type", metavar="TEXT", help="check a run of 'shardproof rlhf', with its options")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from shardproof.cli.hub import run_is_here
    from shardproof.cli.processes import launch

    words = [word for word in argv if word != "--json"]
    kind = recipe_class(words, DoctorConfig, RlhfDoctorConfig)
    config, _ = parse(kind, DESCRIPTION + " --json prints one object.", words, name="doctor")
    check_whole(config, "doctor")
    as_object = len(words) < len(argv)
    if launch.outer_world() is not None:
        if not several():
            raise ConfigError("shardproof doctor starts its own processes: run it without torchrun, with --nproc.")
        return _on_a_rank(config, as_object)
    machines = Machines.of(meeting(config), config.max_restarts)
    if machines is not None:
        before_imports(False, config.verbose)
        return machines.launch(["doctor", *argv], config.nproc)
    try:
        config = with_rows_a_step(config, config.nproc)
        batch = recipe_of(config).check(config, config.nproc)
    except ConfigError as error:
        return _told([_refused(error)], as_object)
    before_imports(run_is_here(config), config.verbose)
    launch.use_threads(1)  # a pool of OpenMP threads does not survive a fork
    after_imports(config.verbose)
    with tempfile.TemporaryDirectory(prefix="shardproof-doctor-") as folder:
        return _told(examine(config, batch, Path(folder)), as_object)


def _on_a_rank(config: Config, as_object: bool) -> int:
    """One of the processes on several machines: the first makes the checks, all take the steps. Returns the exit
    code."""
    import torch.distributed as dist

    from shardproof.cli.hub import run_is_here
    from shardproof.cli.processes.launch import outer_rank, outer_world
    from shardproof.doctor.trial import trial

    here = config.nproc
    config = config.model_copy(update={"nproc": outer_world() or 1})
    problem: ConfigError | None = None
    batch: Any = None
    try:
        batch = recipe_of(config).check(config, config.nproc)
    except ConfigError as error:
        problem = error
    before_imports(run_is_here(config), config.verbose)
    meet(Start(config, problem))
    after_imports(config.verbose)
    begun: list[bool] = []

    def together(prepared: Any, folder: str) -> int:
        begun.append(True)
        dist.broadcast_object_list([prepared], src=0)
        trial(prepared, folder)
        return 0

    code: list[Any] = [0]
    with tempfile.TemporaryDirectory(prefix="shardproof-doctor-") as folder:
        if outer_rank() == 0:
            checks = examine(config, batch, Path(folder), together, here)
            if not begun:
                dist.broadcast_object_list([None], src=0)
            code = [_told(checks, as_object)]
        else:
            parcel: list[Any] = [None]
            dist.broadcast_object_list(parcel, src=0)
            if parcel[0] is not None:
                trial(parcel[0], folder)
    dist.broadcast_object_list(code, src=0)
    dist.destroy_process_group()
    return int(code[0])


def _own_ranks(prepared: Any, folder: str) -> int:
    """Start the ranks of the trial on this machine. Returns the exit code."""
    from shardproof.cli.processes import launch
    from shardproof.cli.watching import work
    from shardproof.doctor.trial import trial

    if launch.forks():
        recipe_of(prepared.config).import_libraries(prepared.config)
    with contextlib.redirect_stdout(None):
        watch = (prepared, trial, (folder,))
        return launch.launch(work, watch, prepared.config.nproc, debug=prepared.config.debug, apart=True)


def _told(checks: list[Check], as_object: bool) -> int:
    """Print the checks. Returns the exit code."""
    if as_object:
        print(as_json(checks))
    else:
        show(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0


def _refused(error: ConfigError) -> Check:
    """A check for options that a run would refuse."""
    return Check("options", "options", "fail", str(error), "The run would be refused.", option_in(error))


def examine(
    config: Config, batch: Batch, folder: Path, take_steps: Steps = _own_ranks, here: int | None = None
) -> list[Check]:
    """All checks that can be made; those that depend on something that failed are left out.

    Args:
        take_steps: runs the trial on all ranks, and returns its exit code.
        here: the number of processes on this machine, if there are other machines.
    """
    from shardproof.doctor.checks import data_checks, machine, plan_checks, resume_checks
    from shardproof.doctor.look import encoded_rows, held_out_rows, loaded_model, read_rows, steps_of
    from shardproof.train.checks.named import check_plugins
    from shardproof.train.model.loading import check_attention, load_processing, tokenizer_of
    from shardproof.train.run import model_source

    try:
        check_plugins(config)
        check_attention(config)
    except ConfigError as error:
        return [_refused(error)]
    checks = [*machine.versions(), *machine.devices(here or config.nproc), *machine.output(config)]
    rows, held_out = read_rows(config, checks)
    if rows is None:
        return checks
    source = model_source(config, folder / "base", rows)
    try:
        processing = load_processing(source, config)
    except ConfigError as error:
        cause, option = "Rows cannot be read.", option_in(error, "--model")
        return [*checks, Check("data", "tokenizer", "fail", str(error), cause, option)]
    encoded = encoded_rows(config, batch, rows, processing, checks)
    checks += data_checks.positions(config, source, encoded)
    if encoded is not None and held_out is not None:
        checks += held_out_rows(config, source, held_out, processing)
    parameters, trainable = loaded_model(config, source, len(tokenizer_of(processing)), checks)
    if parameters:
        steps, epoch = steps_of(config, batch, rows if encoded is None else encoded)
        checks += [*resume_checks.ended(config, steps), *machine.checkpoints(config, steps, epoch)]
        checks += machine.disk(config, machine.bytes_to_write(config, parameters, trainable, steps, epoch))
        checks += plan_checks.memory(config, batch, source, encoded, processing) if config.plan else []
    sound = data_checks.worst([c for c in checks if c.area in ("data", "model") and c.name not in UNTRIED]) != "fail"
    if config.trial and encoded is not None and parameters and sound:
        checks += _trial(config, batch, source, rows, folder, take_steps)
    order = ("environment", "data", "model", "plan", "trial")
    return sorted(checks, key=lambda check: order.index(check.area))


def _trial(config: Config, batch: Batch, source: str, rows: Any, folder: Path, take_steps: Steps) -> list[Check]:
    """The checks of two steps, taken on the first rows."""
    from shardproof.cli.watching import prepared_run
    from shardproof.data.forms.parts import rows_of_kinds
    from shardproof.doctor.checks.data_checks import with_all_files
    from shardproof.doctor.observe import short_run
    from shardproof.doctor.trial import STEPS, ended, judge, with_each

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if isinstance(config, RlhfDoctorConfig) and config.use_vllm and config.vllm_mode == "server":
        seen, cause = "left out", "The answers come from a vLLM server, and two steps would change its weights."
        return [Check("trial", "steps", "warn", seen, cause, "--use-vllm no, to try the steps without it")]
    drawn = isinstance(config, RlhfDoctorConfig) and config.rlhf_type in REWARDED  # a step may draw any row
    first = range(len(rows) if drawn else min(len(rows), batch.whole))
    short = short_run(config, batch, config.nproc, STEPS, str(folder / "trial"), model=source)
    kinds = rows_of_kinds(with_all_files(rows, config))
    taken = rows.take(with_each(first, kinds))
    each = (set(rows_of_kinds([row])) for row in (with_all_files(taken, config) if kinds else ()))
    tried = set(kinds).intersection(*each) if drawn else set[str]().union(*each)
    try:
        code = take_steps(prepared_run(short, taken), str(folder))
    except ShardproofError as error:
        return [Check("trial", "steps", "fail", " ".join(str(error).split()), "The run would end in the same way.")]
    if code:
        return [ended(str(folder), code)]
    return judge(str(folder), kinds, tried)
