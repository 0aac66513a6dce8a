"""`shardproof plan`: show what fits and what is fastest, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof.cli import options
from shardproof.doctor.config import PlanConfig
from shardproof.errors import ConfigError
from shardproof.train.checks.named import NAMED

DESCRIPTION = """Run steps of the model with the real engine on the meta device, as one rank of many, and show what each
stage holds in memory and sends. Needs neither weights nor an accelerator. Exit code 1 if nothing fits."""


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(PlanConfig, "shardproof plan", "shardproof plan [options]", DESCRIPTION)
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    # Runs of rlhf are planned by doctor, before its trial.
    others = {**options.of_others(PlanConfig), "rlhf_type": "shardproof doctor"}
    found = options.parse(parser(), argv, others)
    as_object = found.pop("json", False)
    from shardproof.cli.hub import needs_network, of_modelscope

    config = of_modelscope(options.build(PlanConfig, found), weights=False)
    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.train.model.loading import check_model_source

    if "model" not in config.model_fields_set:
        raise ConfigError(f"--model is missing.\n--model: {NAMED['model']}. A config.json alone will do.")
    there = Path(config.model).expanduser()
    if not config.model.strip() or not there.exists():
        check_model_source(config.model)
    local = there.is_file() or not needs_network(config.model)
    before_imports(local, verbose=False)
    after_imports(verbose=False)
    from rich.console import Console

    from shardproof.doctor.planning.plan import loss_of, make_plan
    from shardproof.doctor.planning.plan_view import as_json, show

    plan = make_plan(config, *loss_of(config))
    if as_object:
        print(as_json(plan))
    else:
        show(plan, config, Console())
    return 0 if plan.fitting else 1
