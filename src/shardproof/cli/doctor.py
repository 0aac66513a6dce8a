"""`shardproof doctor`: what would go wrong, before anything is trained."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli import options
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.cli.training import parse, parser_of, recipe_class
from shardproof.doctor.check import Check, as_json, show
from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
from shardproof.errors import ConfigError, DataError, ShardproofError
from shardproof.train.rlhf_config import REWARDED
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.config import Batch

DESCRIPTION = """Look at machine, rows, model and memory of a fine-tuning run, then run two steps of it on its ranks.
What would spoil the run comes with its cause and the option to change. Exit code 1 if there is something.
With --rlhf-type, given or in run.yaml, it is a run of 'shardproof rlhf' and takes its options."""

Config = DoctorConfig | RlhfDoctorConfig


def parser() -> options.Parser:
    """The option table of the command."""
    made = parser_of(DoctorConfig, DESCRIPTION, name="doctor")
    made.add_argument("--json", action="store_true", help="print one object")  # taken out of the words by `run`
    made.add_argument("--rlhf-type", metavar="TEXT", help="look at a run of 'shardproof rlhf', with its options")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from shardproof.cli import launch
    from shardproof.cli.hub import needs_network

    words = [word for word in argv if word != "--json"]
    kind = recipe_class(words, DoctorConfig, RlhfDoctorConfig)
    config, _ = parse(kind, DESCRIPTION + " --json prints one object.", words, name="doctor")
    if launch.outer_world() is not None:
        raise ConfigError("shardproof doctor starts its own processes: run it without torchrun, with --nproc.")
    batch = recipe_of(config).check(config, config.nproc)
    before_imports(not any(needs_network(model) for model in config.models), config.verbose)
    launch.use_threads(1)  # a pool of OpenMP threads does not survive a fork
    after_imports(config.verbose)
    with tempfile.TemporaryDirectory(prefix="shardproof-doctor-") as folder:
        checks = examine(config, batch, Path(folder))
    if len(words) < len(argv):
        print(as_json(checks))
    else:
        show(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0


def examine(config: Config, batch: Batch, folder: Path) -> list[Check]:
    """All checks that can be made; those that need what has failed are left out."""
    from shardproof.doctor import data_checks, machine, plan_checks
    from shardproof.train.models import load_processing, tokenizer_of
    from shardproof.train.run import model_source

    checks = [*machine.versions(), *machine.devices(config)]
    try:
        rows, _ = recipe_of(config).read(config.model_copy(update={"bad_rows": "skip"}))
    except DataError as error:
        return [
            *checks,
            Check("data", "rows", "fail", str(error), "There is nothing to learn.", "--dataset, --columns"),
        ]
    checks += data_checks.rows(rows, config.bad_rows == "skip")
    source = model_source(config, folder / "base", rows)
    try:
        processing = load_processing(source, config)
    except ConfigError as error:
        return [*checks, Check("data", "tokenizer", "fail", str(error), "Rows cannot be read.", "--model")]
    encoded = _data(config, rows, processing, checks)
    parameters, trainable = _model(config, source, len(tokenizer_of(processing)), checks)
    if parameters:
        checks += machine.disk(config, machine.bytes_to_write(config, parameters, trainable))
        checks += plan_checks.memory(config, batch, source, encoded) if config.plan else []
    sound = data_checks.worst([c for c in checks if c.area in ("data", "model") and c.name != "trained"]) != "fail"
    if config.trial and encoded is not None and parameters and sound:
        checks += _trial(config, batch, source, rows, folder)
    order = ("environment", "data", "model", "plan", "trial")
    return sorted(checks, key=lambda check: order.index(check.area))


def _data(config: Config, rows: Any, processing: Any, checks: list[Check]) -> Any:
    """The encoded rows, or None."""
    from shardproof.data.template import set_template
    from shardproof.doctor import data_checks
    from shardproof.train.media import media_limits
    from shardproof.train.models import tokenizer_of

    recipe: Any = recipe_of(config)
    tokenizer = tokenizer_of(processing)
    checks += data_checks.special_tokens(tokenizer)
    checks += data_checks.files(rows, media_limits(config, processing))
    try:
        set_template(tokenizer, config.chat_template)
        encoded = recipe.encode(config, rows, processing)
    except (ConfigError, DataError) as error:
        checks += data_checks.not_encoded(error)
        return None
    if isinstance(config, RlhfDoctorConfig):
        from shardproof.doctor import rlhf_checks

        checks += rlhf_checks.lengths(encoded.report, config)
        checks += rlhf_checks.answers(config, rows, tokenizer)
        checks += rlhf_checks.labels(config, rows)
        return encoded
    if hasattr(encoded.report, "learnt_tokens"):
        checks += data_checks.lengths(encoded.report, config)
    if processing is tokenizer:
        checks += data_checks.repeated(tokenizer, encoded)
    return encoded


def _model(config: Config, source: str, tokens: int, checks: list[Check]) -> tuple[int, int]:
    """The numbers of parameters and of trained ones; 0 if there is no model."""
    from shardproof.doctor import data_checks, model_checks
    from shardproof.train.models import load_model, with_adapters
    from shardproof.zero.device import default_device

    scores = isinstance(config, RlhfDoctorConfig) and config.rlhf_type == "rm"
    how: dict[str, Any] = {"output_loading_info": True} | ({"num_labels": 1} if scores else {})
    auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    try:
        loaded = load_model(source, config, auto, config.model_type, **how)
        model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
        if scores:  # what gives the score is made anew: it is what is learnt
            info = {**info, "missing_keys": [k for k in info.get("missing_keys", ()) if not k.startswith("score.")]}
        checks += model_checks.loading(info)
        embedding = model.get_input_embeddings()
        if embedding is not None and hasattr(embedding, "weight"):
            checks += data_checks.vocabulary(tokens, embedding.weight.shape[0])
        where = default_device(), config.nproc
        checks += [*model_checks.places(model, *where), *model_checks.finite(model), *model_checks.tied(model)]
        model = with_adapters(model, config)
    except ConfigError as error:
        name = "adapters" if "--target-modules" in str(error) else "model"
        cause = "There would be nothing to train." if name == "adapters" else "It cannot be loaded."
        option = "--target-modules all-linear" if name == "adapters" else "--model"
        checks.append(Check("model", name, "fail", " ".join(str(error).split()), cause, option))
        return 0, 0
    checks += model_checks.trained(model, config)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, mine in sizes if mine)


def _trial(config: Config, batch: Batch, source: str, rows: Any, folder: Path) -> list[Check]:
    """The checks of two steps on the rows of the first."""
    from shardproof.cli import launch
    from shardproof.cli.watching import prepared_run, work
    from shardproof.doctor.observe import short_run
    from shardproof.doctor.trial import STEPS, judge, trial

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first = min(len(rows), batch.whole)
    if isinstance(config, RlhfDoctorConfig):
        if config.use_vllm:
            seen, cause = "left out", "The answers come from a vLLM server, and two steps would change its weights."
            return [Check("trial", "steps", "warn", seen, cause, "--use-vllm no, to try it without")]
        if config.rlhf_type in REWARDED:  # each step learns from answers of its own
            first = len(rows)
    short = short_run(config, batch, config.nproc, STEPS, str(folder / "trial"), model=source)
    try:
        prepared = prepared_run(short, rows[:first])
        if launch.forks():
            recipe_of(config).import_libraries(config)
        with contextlib.redirect_stdout(None):
            code = launch.launch(work, (prepared, trial, (str(folder),)), config.nproc, debug=config.debug, apart=True)
    except ShardproofError as error:
        return [Check("trial", "steps", "fail", " ".join(str(error).split()), "The run would end so, too.")]
    if code:
        return [
            Check(
                "trial",
                "steps",
                "fail",
                f"ended with exit code {code}; its error stands above",
                "",
                "shardproof explain",
            )
        ]
    return judge(str(folder))
