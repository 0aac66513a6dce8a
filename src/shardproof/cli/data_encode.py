"""`shardproof data encode`: encode rows once, to train on them any number of times."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardproof.cli import options, training
from shardproof.cli.quiet import after_imports, before_imports
from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_whole
from shardproof.train.checks.named import check_plugins
from shardproof.train.options.config import RunConfig, SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.run import recipe_of

NAME = "data encode"
DESCRIPTION = """Encode rows once and keep them in --output-dir, for the --cached-dataset of runs that would encode them
in the same way: training rows in the folder train, evaluation rows in val. Takes the options of 'shardproof sft' (or,
after the word rlhf, of 'shardproof rlhf') unchanged; those about training have no effect. Without --max-length no row
is too long: the runs set the limit."""
GROUPS = ("Model", "Task", "Data", "Media", "Algorithm", "Plugins")  # the option groups that --help lists
RECIPES: dict[str, type[RunConfig]] = {"sft": SftConfig, "rlhf": RlhfConfig}


def parser(recipe: str = "sft") -> options.Parser:
    """The option table of the command."""
    prog = f"shardproof {NAME}"
    usage = f"{prog} [sft|rlhf] [run.yaml] --model M --dataset D --output-dir DIR [options]"
    made = options.parser_for(RECIPES[recipe], prog, usage, DESCRIPTION, GROUPS)
    options.add_run_file(made)
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from shardproof.train.rows.cached import ANY_LENGTH

    recipe = argv[0] if argv and argv[0] in RECIPES else "sft"
    words = argv[1:] if argv and argv[0] in RECIPES else argv
    model = RECIPES[recipe]
    found = options.parse(parser(recipe), words, options.of_others(model))
    config, given = training.read(model, found, words, f"shardproof {NAME}")
    if config.output_dir is None:
        raise ConfigError(f"--output-dir is missing: '{NAME}' writes the folders train and val into it.")
    folder = Path(config.output_dir).expanduser()
    there = [place.name for place in sorted(folder.glob("*"))] if folder.is_dir() else []
    if there and not config.overwrite:
        raise ConfigError(f"{folder} holds {', '.join(there[:5])}. Name another --output-dir, or add --overwrite.")
    if "max_length" not in given:
        if config.truncation != "drop":
            raise ConfigError(f"--truncation {config.truncation} needs --max-length, the length to cut rows to.")
        config = config.model_copy(update={"max_length": ANY_LENGTH})
    config = config.model_copy(update={"output_dir": None, "resume": None, "overwrite": False})
    return _encode(config, folder)


def _encode(config: RunConfig, folder: Path) -> int:
    from shardproof.cli.hub import run_is_here

    check_whole(config, NAME)
    recipe = recipe_of(config)
    getattr(recipe, "check_rows", recipe.check)(config, config.nproc)
    before_imports(run_is_here(config), config.verbose)
    check_plugins(config)
    from shardproof.data.encoding.beside import telling
    from shardproof.report.terminal import Share
    from shardproof.train.encoding import VAL, encode

    after_imports(config.verbose)
    with Share("encoding rows") as told, telling(told):
        made = encode(config, folder)
    for kept in made:
        left_out = f"; {kept.skipped:,} bad rows left out" if kept.skipped else ""
        print(f"encoded: {kept.folder}: {kept.report}{left_out}")
    flags = [("--cached-val-dataset" if kept.folder.name == VAL else "--cached-dataset", kept.folder) for kept in made]
    named = " ".join(f"{flag} {shlex.quote(str(place))}" for flag, place in flags)
    print(f"train on them: shardproof {config.command} {named} ...")
    return 0
