"""`shardproof cases`: run the casebook on our engine and on its peers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shardproof.cli import options
from shardproof.errors import ConfigError

DESCRIPTION = """Run failure cases from public threads on our engine and on its peers, each in separate processes with a
time limit, and show which match the results of a single process. Exit code 1 if ours ever does not."""
FAMILIES = ("ours", "ddp", "fsdp2", "deepspeed")  # as in the casebook, which is not imported for --help


class CasesConfig(BaseModel):
    """The options."""

    model_config = ConfigDict(extra="forbid")

    engines: str = Field("ours", description="some of ours,ddp,fsdp2,deepspeed")
    stages: str = Field("0,1,2,3", description="stages of ours and of DeepSpeed (which has none at 0)")
    case: list[str] = Field([], description="run these cases only")
    world: int = Field(2, description="ranks", ge=2)
    limit: float = Field(60.0, description="seconds until a case counts as hanging", gt=0)
    page: str | None = Field(None, description="write this page, in Markdown, from the results")
    read: str | None = Field(None, description="run nothing, take the results from this file")


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.parser_for(CasesConfig, "shardproof cases", "shardproof cases [options]", DESCRIPTION)
    made.add_argument("--json", metavar="FILE", help="results (default: casebook.json; none if cases are named)")
    made.add_argument("--update", action="store_true", help="keep the results of other cases and engines")
    made.add_argument("--list", action="store_true", help="run nothing, list the cases")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    found = options.parse(parser(), argv)
    file, update, listing = found.pop("json", None), found.pop("update", False), found.pop("list", False)
    config = options.build(CasesConfig, found)
    families = _words(config.engines, FAMILIES, "--engines")
    stages = [int(word) for word in _words(config.stages, ("0", "1", "2", "3"), "--stages")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process started below uses one thread
    if listing:
        return _list()
    if config.read:
        return _write_page(Path(config.read), config.page)
    if file is None and (update or not config.case):
        file = "casebook.json"
    for option, place in (("--json", file), ("--page", config.page)):  # before the cases take their time
        if place and not Path(place).absolute().parent.is_dir():
            raise ConfigError(f"{option} {place} cannot be written: there is no folder {Path(place).parent}.")
    return _run(config, families, stages, Path(file) if file else None, update)


def _words(text: str, known: Sequence[str], option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"{option} {text}: {word!r} is not one of {', '.join(known)}.{options.nearest(word, known)}"
            )
    if not words:
        raise ConfigError(f"{option} is empty; it takes one or more of {','.join(known)}.")
    return words


def _list() -> int:
    from shardproof.casebook.case import all_cases

    for name, case in all_cases().items():
        print(f"{name:40}{','.join(map(str, case.classes)):8}{case.users}")
    return 0


def _write_page(source: Path, target: str | None) -> int:
    from shardproof.casebook.document import page, read_json

    text = page(read_json(source))
    if target:
        Path(target).write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


def _run(config: CasesConfig, families: list[str], stages: list[int], file: Path | None, update: bool) -> int:
    from shardproof.casebook import runner, table
    from shardproof.casebook.case import all_cases, case_named
    from shardproof.casebook.document import as_json, kept, ordered, page, write_json
    from shardproof.casebook.engines import names_of

    names = config.case or list(all_cases())
    for name in names:
        case_named(name)
    wanted = names_of(families, stages)
    engines = runner.available(wanted)
    if wanted != engines:
        print("DeepSpeed is not installed and is left out ('make peers' installs it).")
    results = kept(file, names, engines, config.world, config.limit) if file and update else []
    own: list[runner.Result] = []
    view = table.view(names, engines)

    def report(result: runner.Result) -> None:
        """Show the result and save it at once, so that an interrupted run keeps what it has."""
        own.append(result)
        view.add(result)
        if file:
            write_json(file, ordered([*results, *own]), config.world, config.limit)

    view.begin()
    try:
        runner.run_all(names, engines, config.world, config.limit, report)
    finally:
        view.end()
    print("\n".join(table.summary(own)))
    if config.page:
        content = as_json(ordered([*results, *own]), config.world, config.limit)
        Path(config.page).write_text(page(content), encoding="utf-8")
    failed = runner.failures(own)
    for result in failed:
        print(table.line(result))
    return 1 if failed else 0
