"""What the commands that train share: options from a file and the command line, checks, launch, and printed lines."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof.cli import options
from shardproof.cli.from_swift.towers import of_towers
from shardproof.cli.hub import placed
from shardproof.cli.main import USER_ERROR, exit_code
from shardproof.cli.precision import check_devices, precision_here
from shardproof.cli.processes.elastic import launch_run
from shardproof.cli.processes.launch import outer_rank, outer_world, peers_left, restarts, stop_signals, use_threads
from shardproof.cli.processes.machines import Machines, Start, check_shared, meet, several
from shardproof.cli.processes.slurm import join_tasks
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.errors import ConfigError, ShardproofError
from shardproof.interrupts import raise_again
from shardproof.train.adapters.beginning import takes_from_weights
from shardproof.train.adapters.begun import begun
from shardproof.train.checks.named import check_plugins
from shardproof.train.folder import ERRORS, SKIPPED, RunFolder, options_of_resumed
from shardproof.train.goes_on import way_on, without_checkpoint
from shardproof.train.options.config import RunConfig
from shardproof.train.resume import AUTO, SIZES, at_its_end, with_folder, with_rows_a_step
from shardproof.train.run import again, recipe_of

if TYPE_CHECKING:
    from shardproof.train.options.config import Batch
    from shardproof.train.run import Prepared

Config = TypeVar("Config", bound=RunConfig)


def parser_of(model: type[RunConfig], description: str, name: str | None = None) -> options.Parser:
    """The option table of a recipe. `name` is the command's, if not the recipe's."""
    prog = f"shardproof {name or model.command}"
    parser = options.parser_for(model, prog, f"{prog} [run.yaml] [options]", description)
    options.add_run_file(parser)
    return parser


def parse(
    model: type[Config], description: str, argv: Sequence[str], name: str | None = None
) -> tuple[Config, set[str]]:
    """The options of a recipe, and the names of those that were given. `name` is the command's, if not the recipe's."""
    parser = parser_of(model, description, name)
    return read(model, options.parse(parser, argv, options.of_others(model)), argv, parser.prog)


def read(model: type[Config], found: dict[str, Any], argv: Sequence[str], prog: str) -> tuple[Config, set[str]]:
    """The same from the arguments of `prog`, including its file, the resumed run, and variables."""
    for source in found.get("dataset", []):
        if source.endswith((".yaml", ".yml")):
            raise ConfigError(f"--dataset {source}: a file of options comes first: {prog} {source} ...")
    told = of_towers(argv, found.get("run_file") or found.get("config"))
    values = options.take_run_file(found, model)
    values |= found
    given, of_run = set(values), {}
    if "resume" in values and not {"model", "dataset"} & given:
        of_run = _of_resumed(values, model)
    values = options.from_variables(model, os.environ, bool(outer_world())) | of_run | values
    if "system" in values:
        values["system"] = options.system_message(values["system"])
    default = {} if "precision" in values else {"precision": precision_here()}
    config = options.build(model, default | values)
    config.model_fields_set.update(told)
    config.model_fields_set.difference_update({*SIZES} - given)  # resumed sizes may fit other processes
    return begun(placed(config)), given


def _of_resumed(values: dict[str, Any], model: type[RunConfig]) -> dict[str, Any]:
    """The options of the run that --resume names, if neither a model nor rows are named; empty if there is no such
    run."""
    file = options_of_resumed(values["resume"], values.get("output_dir"))
    if file is None:
        return {}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"Options that are not given are taken from the resumed run: {file}", file=sys.stderr)
    return options.read_file(str(file), model)


def run(model: type[RunConfig], description: str, argv: Sequence[str]) -> int:
    """A command. Returns the exit code."""
    config, given = parse(model, description, argv)
    if config.launcher == "local":
        join_tasks(os.environ, config.nproc, config.nnodes)
    if config.launcher == "ray" and outer_world() is None:
        from shardproof.cli.processes import on_ray

        return on_ray.launch(config, [model.command, *argv])
    if outer_world() is None:
        check_devices(config.nproc)
    machines = Machines.of(meeting(config), config.max_restarts) if outer_world() is None else None
    if machines is not None:
        before_imports(False, config.verbose)
        return machines.launch([model.command, *argv], config.nproc, config.max_restarts)
    return start(config, given)


def meeting(config: RunConfig) -> dict[str, str]:
    """Where several machines meet, from the variables; options take precedence."""
    options_of = {"NNODES": config.nnodes, "NODE_RANK": config.node_rank}
    options_of |= {"MASTER_ADDR": config.master_addr, "MASTER_PORT": config.master_port}
    return dict(os.environ) | {name: str(value) for name, value in options_of.items() if value is not None}


def start(config: RunConfig, given: set[str], ask: str | None = None) -> int:
    """Prepare in this process, then train on --nproc of them (or as a rank of an outer torchrun).

    `ask`: a question that the trained model is to answer at the end.
    """
    from shardproof.cli.hub import run_is_here
    from shardproof.cli.processes import launch

    started = time.perf_counter()
    outer = outer_world()
    world_size = outer or config.nproc
    here = int(os.environ.get("LOCAL_WORLD_SIZE", outer or 0))
    if config.launcher == "ray":
        here = world_size  # the processes of all nodes
    if outer and "nproc" in given and config.nproc != here:
        raise ConfigError(f"--nproc {config.nproc}, but {here} processes were started here already: leave --nproc out.")
    config = with_folder(config.model_copy(update={"nproc": world_size}))

    def looked_at(config: RunConfig) -> Start:
        try:
            recipe_of(config).check(config, world_size)
            before_imports(run_is_here(config), config.verbose)
            check_plugins(config)
        except ShardproofError as problem:
            if not several():  # all ranks found the same problem
                raise
            return Start(config, problem)
        return Start(config)

    goes_on = outer and config.writes_checkpoints and config.output_dir
    resumed = config.model_copy(update={"resume": AUTO}) if goes_on else config
    first_time = looked_at(resumed if restarts() and not several() else config)
    if outer:
        later = looked_at(resumed) if several() and resumed is not config else first_time
        return _under_torchrun(first_time, later, world_size, started)
    prepared = _prepare(config, world_size, forking=world_size > 1 or config.max_restarts > 0)
    folder = RunFolder(prepared.folder)
    try:
        with folder.discarded_if_it_fails():
            _say_prepared(prepared)
            if (world_size > 1 or config.max_restarts) and launch.forks():
                recipe_of(config).import_libraries(config)  # imported once, for all ranks
            raise_again()
            code = launch_run(work, prepared, world_size)
    except (Exception, KeyboardInterrupt) as problem:
        _say_what_is_left(prepared, exit_code(problem))
        raise
    finally:
        if prepared.lock is not None:
            prepared.lock.release()
    interrupted = code > 128
    if code == 0 or (interrupted and folder.model.exists()):
        return _finish(prepared, started, code, ask)
    folder.discard_unless_used()
    _say_what_is_left(prepared, code)
    return code


def _prepare(config: RunConfig, world_size: int, forking: bool) -> Prepared:
    from shardproof.data.encoding.beside import telling
    from shardproof.report.terminal import Share

    config, recipe = with_rows_a_step(config, world_size), recipe_of(config)
    rows = recipe.read(config)  # reports a bad row before torch is imported
    _say_plan(config, recipe.check(config, world_size), *rows)
    if forking:
        use_threads(1)  # a pool of OpenMP threads does not survive a fork
    after_imports(config.verbose)
    with Share("encoding rows") as told, telling(told):
        return recipe.prepare(config, world_size, *rows)


def work(prepared: Prepared, signals: Sequence[int]) -> int:
    """The work of each rank. It makes the process group, so it also destroys it.

    Returns: which of `signals` ended it early, or 0.
    """
    import torch

    from shardproof.report import terminal
    from shardproof.zero.comm.world import start_group
    from shardproof.zero.ranks.consensus import explained

    if restarts():
        prepared = again(prepared, int(os.environ["WORLD_SIZE"]))
    before_imports(False, prepared.config.verbose)  # a spawned process starts afresh
    after_imports(prepared.config.verbose)
    # Rows were encoded by threads, which do not survive a fork: processes that read rows would wait for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rank = int(os.environ.get("RANK", "0"))
    distributed = "RANK" in os.environ
    if distributed and not torch.distributed.is_initialized():
        start_group()
    try:
        view = terminal.view() if rank == 0 else terminal.Silent()
        stopped = recipe_of(prepared.config).train(prepared, view, signals=signals)
    except Exception as problem:
        error = explained(problem)
        if not isinstance(error, ShardproofError) and not peers_left(error):
            with contextlib.suppress(OSError), (prepared.folder / ERRORS).open("a", encoding="utf-8") as file:
                file.write(f"rank {rank}\n{traceback.format_exc()}\n")
        if error is not problem:
            raise error from None
        raise
    if distributed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return stopped


def _under_torchrun(first_time: Start, resumed: Start, world_size: int, started: float) -> int:
    """Rank 0 prepares and hands the result to the others; if it cannot, it alone says so."""
    import torch

    from shardproof.cli.processes.same_rows import check_rows
    from shardproof.zero.comm.world import start_group

    if several():
        config = meet(first_time, resumed, restarts())
    else:
        config = first_time.config
        start_group()
    first = outer_rank() == 0
    parcel: list[Any] = [None, None]
    failure: ShardproofError | None = None
    if first:
        try:
            prepared = _prepare(config, world_size, forking=False)
            if several():  # other launchers may have been started in other folders
                prepared.folder = prepared.folder.absolute()
                prepared.starts = [start.absolute() for start in prepared.starts]
            parcel = [prepared, None]
        except ShardproofError as error:
            failure, parcel = error, [None, exit_code(error)]
    torch.distributed.broadcast_object_list(parcel, src=0)
    prepared, code = parcel
    if prepared is None:
        torch.distributed.destroy_process_group()
        if failure is not None:
            raise failure
        return int(code)
    with RunFolder(prepared.folder).discarded_if_it_fails() if first else contextlib.nullcontext():
        if several():
            check_shared(prepared.folder, config)
            check_rows(prepared)
        if first:
            _say_prepared(prepared)
        try:
            stopped = work(prepared, stop_signals(1))
        except (Exception, KeyboardInterrupt) as problem:
            if first:
                _say_what_is_left(prepared, exit_code(problem))
            raise
    if first and stopped:  # other ranks have ended, so the launcher tells this one to end too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if first and prepared.lock is not None:
        prepared.lock.release()
    code = 128 + stopped if stopped else 0
    return _finish(prepared, started, code) if first else code


def _say_plan(config: RunConfig, batch: Batch, rows: Any, val_rows: Any) -> None:
    """Print what is about to be done, as soon as all checks have passed."""
    from shardproof.data.rows import SHOWN
    from shardproof.report.terminal import table

    copies = f", a copy in every {config.shard_group}" if config.shard_group else ""
    copies += f", offload {config.offload}" if config.offload else ""
    how_many = f"{len(rows):,} rows" if hasattr(rows, "__len__") else "rows are read while training"
    held_out = f", {len(val_rows):,} to evaluate on" if val_rows is not None else ""
    named = [*config.dataset, *config.cached_dataset]
    more = f" and {len(named) - SHOWN:,} more" if len(named) > SHOWN else ""
    lines = [
        ("model", f"{config.model} ({config.summary})"),
        ("data", f"{' '.join(named[:SHOWN])}{more}: {how_many}{held_out}"),
        *([("mixed", rows.shares())] if config.interleave_prob and hasattr(rows, "shares") else []),
        ("batch", str(batch)),
        ("sharding", f"stage {config.stage} on {config.nproc} process(es){copies}"),
        *([("compiled", "each block, in the first steps: minutes without output")] if config.compile else []),
    ]
    print(table(lines), flush=True)


def _say_prepared(prepared: Prepared) -> None:
    from shardproof.models.loading.packed import unpacked_from
    from shardproof.report.terminal import table
    from shardproof.train.settings import learns_nothing

    lines = [("encoded", str(prepared.rows.report))]
    if (experts := getattr(prepared, "experts", None)) is not None:
        lines.append(("experts", str(experts.report)))
    if packed := unpacked_from(prepared.model):
        lines.append(("unpacked", f"weights that are packed in the model's files ({packed})"))
    if prepared.val_rows is not None and getattr(prepared.val_rows.report, "dropped", None):
        lines.append(("held out", str(prepared.val_rows.report)))
    if prepared.skipped:
        first = "; ".join(prepared.skipped[:2])
        lines.append(("skipped", f"{len(prepared.skipped):,} bad row(s), listed in {SKIPPED}: {first}"))
    lines.append(("output", f"{prepared.folder}, {prepared.steps:,} step{'s' * (prepared.steps != 1)}"))
    if learns_nothing(prepared):
        lines.append(("rate", "0 in the only step, which is warm-up, so nothing is learned; give --warmup-steps 0"))
    if prepared.starts:
        lines.append(("resumed", f"from {prepared.starts[0]}"))
    print(table(lines), flush=True)


def _finish(prepared: Prepared, started: float, code: int, ask: str | None = None) -> int:
    """Report where the weights are. `code`: the exit code of a stopped run, or 0. Returns it."""
    from shardproof.report.picture import draw_loss
    from shardproof.report.terminal import clock

    folder = RunFolder(prepared.folder)
    config = prepared.config
    if folder.metrics.is_file():  # a run that was resumed at its end, in another folder, has logged nothing
        draw_loss(folder.metrics, folder.picture, f"{config.model}, stage {config.stage} on {config.nproc}")
    shutil.rmtree(folder.rows, ignore_errors=True)
    if config.tuner == "full":
        shutil.rmtree(folder.base, ignore_errors=True)  # the initial weights of --model tiny
    if ask and not code:
        _ask(folder, ask)
    duration = clock(time.perf_counter() - started)
    # This was reported already. If its checkpoint is damaged, the run repeats steps from an earlier one.
    at_end = any(at_its_end(start, prepared.steps, config) for start in prepared.starts[:1])
    if code or not at_end or folder.checksum_of_steps() != prepared.logged:
        print(f"stopped after step {folder.last_step()} of {prepared.steps}" if code else f"done in {duration}")
    if code and not config.writes_checkpoints:
        print("there is no checkpoint to resume from; --save-steps N would have written one")
    elif code and (newest := folder.newest_checkpoint()):
        print(way_on(config, newest, restarted=restarts() > 0))
    if not code and config.early_stop and folder.last_step() < prepared.steps:
        worse = f"{config.best_metric} was no better in {config.early_stop} evaluation(s)"
        print(f"ended after step {folder.last_step()} of {prepared.steps}: {worse}")
    kind = "adapter" if config.tuner != "full" else "weights"
    turned = f" (of rank {2 * config.lora_rank}, for the model as it was)" if takes_from_weights(config) else ""
    print(f"{kind}: {folder.model}{turned}")
    if config.talks:
        plugins = f" --external-plugins {shlex.join(config.external_plugins)}" if config.external_plugins else ""
        what = "ask it" if config.recipe in ("seq_cls", "embedding", "reranker") else "talk to it"
        plain = " --plain" if config.recipe == "sft" and config.plain else ""
        print(f"{what}: shardproof infer {shlex.quote(str(folder.path))}{plain}{plugins}")
    return code


def _say_what_is_left(prepared: Prepared, code: int) -> None:
    """Report what remains of a run that ended early, with this exit code."""
    from shardproof.report.terminal import restore

    restore()
    folder = RunFolder(prepared.folder)
    if folder.model.exists() and folder.last_step() >= prepared.steps:  # only an evaluation failed
        print(f"\nweights: {folder.model}", file=sys.stderr)
    elif step := folder.last_step():
        newest, config, failed = folder.newest_checkpoint(), prepared.config, code == USER_ERROR
        if newest:
            left = way_on(config, newest, "when that is fixed, " if failed else "", restarts() > 0)
        else:
            left = without_checkpoint(config, prepared.starts[0] if prepared.starts else None, failed)
        print(f"\nended after step {step} without saving weights; its log is in {folder.path}\n{left}", file=sys.stderr)
    elif code > 128:
        print("\ninterrupted before the first step; no run folder was left", file=sys.stderr)


def _ask(folder: RunFolder, question: str) -> None:
    from shardproof.train.answers.chat import Chat
    from shardproof.train.answers.sampling import Sampling

    answer = Chat(folder.model).answer([{"role": "user", "content": question}], Sampling(max_new_tokens=60))
    print(f"asked:    {question}\nanswered: {answer}")
