"""`shardproof swift "swift sft ..."`: translate a run into our command, and report what has no equivalent."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path

from pydantic import BaseModel

from shardproof.cli import export, infer, infer_asked, options
from shardproof.cli.deepspeed_file import same
from shardproof.cli.from_swift import shell
from shardproof.cli.from_swift.cached import about_rows, encodes, for_recipe
from shardproof.cli.from_swift.defaults import (
    DEFAULTS,
    INSTEAD_OF,
    OF_RLHF,
    OF_TASK,
    answers,
    holds_out,
    is_on,
    takes_betas,
)
from shardproof.cli.from_swift.environment import of_environment, other_meanings
from shardproof.cli.from_swift.hubs import with_hub
from shardproof.cli.from_swift.models import against_vllm, longest, looks_or_hears, with_files, without_parts
from shardproof.cli.from_swift.options import (
    as_words,
    at_odds,
    hint,
    meant_as_ours,
    ours,
)
from shardproof.cli.from_swift.places import defaults_of_infer, placed
from shardproof.cli.from_swift.tuners import of_other_tuners, with_new_blocks
from shardproof.cli.from_swift.values import ADDED, NLG, TOWERS
from shardproof.errors import ConfigError
from shardproof.plugins import Plugins, check_names
from shardproof.train.checks.contradictions import OF_ANSWERS, check_together
from shardproof.train.checks.tuners import OF_ADAPTERS, ONLY_LORA
from shardproof.train.options.config import RunConfig
from shardproof.train.options.rlhf_config import REFERRED, REWARDED, RlhfConfig

EVALUATIONS = "eval_steps", "eval_strategy", "eval_on_start"
_LORA_ONLY = ("lora_rank", "lora_dropout")
_WHOLE_BATCH = 16
# Commands about a finished model: their options and parsers.
FINISHED: dict[str, tuple[type[BaseModel], Callable[[], options.Parser]]] = {
    "infer": (infer_asked.InferConfig, infer.parser),
    "export": (export.ExportConfig, export.parser),
}
# Options that do not change results and cannot be combined with rows that are split over processes.
OF_WHOLE_ROWS = {
    "attn": "rows that are split over processes use torch's attention, which has its own flash kernels",
    "padding_free": "rows that are split over processes are padded",
    "liger_kernel": "for rows that are split over processes --chunked-loss keeps logits small",
}
PACKED = (
    "--packing is --padding-free here: no padding is computed either way, but a micro-batch has "
    "--per-device-batch-size rows, in ms-swift as many as fill --max-length: raise it to what fits"
)

HELP = """usage: shardproof swift "swift sft|rlhf|infer|export ..." | SCRIPT.sh

Translate an ms-swift command into ours, with ms-swift's differing defaults written out, and report what has no
equivalent or still differs.
"""


def parser() -> options.Parser:
    """The option table of the command."""
    made = options.Parser(
        prog="shardproof swift",
        usage='shardproof swift "swift sft|rlhf|infer|export ..." | SCRIPT.sh',
        description=HELP.split("\n\n", 1)[1].strip(),
        allow_abbrev=False,
    )
    made.add_argument("text", nargs="+", metavar="SCRIPT.sh", help="a command in quotes, or a file that holds it")
    return made


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code: 1 where something has no equivalent."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    text = argv[0] if len(argv) == 1 else shlex.join(argv)
    if len(argv) > 1 and argv[0] in shell.READ:  # `shardproof` in front of `swift sft ...`
        text = f"swift {text}"
    is_file = False
    with contextlib.suppress(OSError):  # a command may be too long for a file name
        is_file = len(argv) == 1 and Path(text).expanduser().is_file()
    if not is_file and not re.search(r"\s", text.strip()) and text.strip() not in ("", "swift"):
        raise ConfigError(f"There is no file {text}.")
    if is_file:
        text = Path(text).expanduser().read_text(encoding="utf-8")
    command, notes, missing = translate(text)
    print(command)
    for note in notes:
        print(f"# {note}")
    for reason in missing:
        print(f"not here: {reason}", file=sys.stderr)
    return 1 if missing else 0


def translate(text: str) -> tuple[str, list[str], list[str]]:
    """Returns our commands, notes about them, and what has no equivalent.

    Raises:
        ConfigError: the text holds no ms-swift command of these kinds, or one that cannot run.
    """
    commands, notes, missing = zip(*(_brought_over(line) for line in shell.read(text)), strict=True)
    return "\n".join(commands), list(dict.fromkeys(chain(*notes))), [*chain(*missing), *shell.not_read(text)]


def _brought_over(line: shell.Line) -> tuple[str, list[str], list[str]]:
    notes: list[str] = []
    line = with_hub(line, notes)
    if encodes(line):
        return _of_encoded(line, notes)
    if line.command in FINISHED:
        return _of_finished(line, notes)
    return _of_run(line, notes)


def _of_run(line: shell.Line, notes: list[str]) -> tuple[str, list[str], list[str]]:
    """Our command, notes about it, and what has no equivalent."""
    config = _config(line.command)
    given = [name for name, _ in line.options]
    known = meant_as_ours({*config.model_fields, "run_file"}, given)
    values, missing = _adopted(line, known, notes)
    missing += line.missing
    with_new_blocks(values)
    without_parts(values, given, notes)
    own_model = ("model",) if "adapters" not in values else ()  # adapters name theirs
    rows = () if "cached_dataset" in values else ("dataset",)
    for name in (*own_model, *rows):
        if name not in values and not any(f"--{name}" in reason for reason in missing):
            raise ConfigError(f"There is no --{name} in this command, and ms-swift has no default for it.")
    for name, value in of_environment(line.variables, line.exported, notes).items():
        values.setdefault(name, [value])
    missing += other_meanings(line.variables, of_swift=True)
    built = _built(config, values)
    if looks_or_hears(values.get("model", [""])[0]):
        with_files(values, notes)
        _freeze_towers(values, given, notes)
    _add_defaults(values, known, notes, int(nodes) if (nodes := line.variables.get("NNODES", "1")).isdigit() else 1)
    _leave_out_what_does_nothing(values, notes)
    if "rlhf_type" in known:
        missing += _without_meaning(values, built)
    if not missing:
        missing += _refused(config, values)
    if line.dressed:
        notes.append("the shell syntax around the command (nohup, > log, | tee, &) is left out: add it to this one")
    return _written(line.command, values), notes, missing


def _written(command: str, values: dict[str, list[str]]) -> str:
    lines = [f"{options.flag(name)} {shlex.join(value)}".rstrip() for name, value in values.items()]
    return " \\\n    ".join([f"shardproof {command}", *lines])


def _of_encoded(line: shell.Line, notes: list[str]) -> tuple[str, list[str], list[str]]:
    """The same for an export that encodes rows. Options that are not about rows have no effect there and are left
    out."""
    recipe, line = for_recipe(line)
    config = _config(recipe)
    known = meant_as_ours({*config.model_fields}, [name for name, _ in line.options])
    values, missing = _adopted(line, known, notes)
    missing += [*line.missing, *other_meanings(line.variables, of_swift=True)]
    for name, value in of_environment(line.variables, line.exported, notes).items():
        values.setdefault(name, [value])
    values.setdefault("bad_rows", DEFAULTS["bad_rows"].split())
    idle = [name for name in values if not about_rows(config, name)]
    notes += [
        f"{options.flag(name)} {' '.join(values.pop(name))} is left out: it has no effect on rows" for name in idle
    ]
    if not missing:
        missing += _refused(config, values)
    return _written(f"data encode{' rlhf' if recipe == 'rlhf' else ''}", values), notes, missing


def _of_finished(line: shell.Line, notes: list[str]) -> tuple[str, list[str], list[str]]:
    """The same for a command about a finished model."""
    config, parser = FINISHED[line.command]
    argv = [word for name, given in line.options for word in as_words(options.flag(name), given)]
    words: list[str] = []
    missing = [*other_meanings(line.variables, of_swift=True), *line.missing, *against_vllm(line.options)]
    try:
        words, idle = placed(line.command, argv, config.model_fields)
        notes += [f"{reason} is left out" for reason in idle]
        given = {word for word in words if word.startswith("--")}
        for name, value in of_environment(line.variables, line.exported, notes).items():
            about_rows = line.command != "export" or "--quantize" in given  # a plain export has no rows
            if about_rows and name in config.model_fields and options.flag(name) not in given:
                words += [options.flag(name), value]
            elif name != "nproc" or value != "1":
                said = options.flag(name) in given
                why = "another option sets it" if said else f"'shardproof {line.command}' has no use for it here"
                notes.append(f"{options.flag(name)} {value}, a variable in ms-swift, is left out: {why}")
        words += defaults_of_infer(dict(line.options), words, notes) if line.command == "infer" else []
        found = options.parse(parser(), words, command=line.command)
        options.build(config, {name: value for name, value in found.items() if name in config.model_fields})
    except ConfigError as error:
        missing.append(str(error))
    return shlex.join(["shardproof", line.command, *words]), notes, missing


def _adopted(line: shell.Line, known: Collection[str], notes: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Our options and their values, and what has no equivalent."""
    values: dict[str, list[str]] = {}
    missing: list[str] = []
    said: dict[str, tuple[str, list[str]]] = {}
    judged = any(name == "task_type" and given not in (["causal_lm"], ["none"]) for name, given in line.options)
    for name, given in line.options:
        flag = options.flag(name)
        if name == "packing" and (name not in known or judged) and given[:1] not in (["false"], ["False"]):
            notes.append(PACKED)
            name = "padding_free"
        try:
            found = ours(name, given, known, notes)
        except ConfigError as error:
            missing.append(str(error))
            continue
        if isinstance(found, str):
            notes.append(f"{flag} is left out: {found}")
        elif found is None and name not in known:
            near = hint(name) or options.meant(flag, known)
            missing.append(f"{flag} {' '.join(given)}: unknown.{near}")
        else:
            for option, meant in found if found is not None else [(name, given)]:
                first, _ = said.setdefault(option, (flag, meant))
                if first != flag and option not in ADDED and not same(values[option], meant):
                    missing.append(at_odds(option, said[option], (flag, meant)))
                else:
                    values[option] = values.get(option, []) + meant if option in ADDED else meant
    return values, missing


def _without_meaning(values: dict[str, list[str]], built: BaseModel) -> list[str]:
    """Remove from `values` what the algorithm would refuse, and return notes about it."""
    from shardproof.train.rlhf.algorithms import MEANT_FOR

    kind = values.get("rlhf_type", ["dpo"])[0]
    fields = type(built).model_fields
    idle = [
        name
        for name in values
        if kind not in MEANT_FOR.get(name, (kind,)) and getattr(built, name) != fields[name].default
    ]
    return [f"{options.flag(name)} {' '.join(values.pop(name))}: does not apply to --rlhf-type {kind}" for name in idle]


def _built(config: type[RunConfig], values: dict[str, list[str]]) -> RunConfig:
    return options.build(
        config, {name: value[0] if len(value) == 1 else value or "true" for name, value in values.items()}
    )


def _refused(config: type[RunConfig], values: dict[str, list[str]]) -> list[str]:
    """Why the command would be refused, as far as its options tell. What plugin files register is not known before they
    run."""
    built = _built(config, values)
    from shardproof.train.resume import check_saving
    from shardproof.train.rlhf.algorithms import check_losses
    from shardproof.train.rlhf.chord import check_chord

    try:
        check_together(built)
        check_saving(built)
        if not built.external_plugins:
            check_names(built, Plugins())
        if isinstance(built, RlhfConfig):
            check_losses(built)
            check_chord(built)
    except ConfigError as error:
        return [f"this command would be refused: {error}"]
    return []


def _config(command: str) -> type[RunConfig]:
    if command == "sft":
        from shardproof.train.options.config import SftConfig

        return SftConfig
    return RlhfConfig


def _freeze_towers(values: dict[str, list[str]], given: Collection[str], notes: list[str]) -> None:
    """ms-swift trains towers and aligner only if told to, or if the names of their layers are among the adapters'
    targets."""
    named = values.get("target_modules", ["all-linear"]) != ["all-linear"]
    if "modules_to_save" in values and {*TOWERS["vit"]} <= {*values["modules_to_save"]}:
        values.pop("freeze", None)  # ms-swift ignores it here: towers and aligner are fully trained
        return
    if named and values.get("tuner", ["lora"]) != ["full"]:
        if values.pop("freeze", None):
            notes.append("named modules get adapters in towers, too; ms-swift freezes towers for all-linear alone")
        return
    frozen = [part for name in ("vit", "aligner") if f"freeze_{name}" not in given for part in TOWERS[name]]
    if frozen:
        values["freeze"] = [*values.get("freeze", []), *frozen]


def _add_defaults(values: dict[str, list[str]], known: Collection[str], notes: list[str], nodes: int) -> None:
    """Write out ms-swift's defaults that differ from ours, for a run on this number of nodes."""
    kind = values.get("rlhf_type", ["dpo"])[0] if "rlhf_type" in known else ""
    task = values.get("task", [""])[0]
    for name, value in {**DEFAULTS, **OF_RLHF.get(kind, {}), **OF_TASK.get(task, {})}.items():
        elsewise = INSTEAD_OF.get(name)
        if (
            name in known
            and not (elsewise and elsewise in values)
            and (name != "adam_beta2" or takes_betas(values))
            and not (name in _LORA_ONLY and (values["tuner"] != ["lora"] or "adapters" in values))
        ):
            values.setdefault(name, value.split())
    of_other_tuners(values)
    if "adapters" in values and kind in REFERRED:
        values.setdefault("ref_adapters", ["none"])
    values.setdefault("learning_rate", ["1e-5" if values["tuner"] == ["full"] else "1e-4"])
    if values["gradient_checkpointing"][:1] in (["yes"], ["true"], []):
        balanced = values.get("router_aux_loss_coef", ["0"]) not in (["0"], ["0.0"])  # no gradient if reentrant
        values.setdefault("checkpointing_reentrant", ["no" if values["stage"] == ["0"] or balanced else "yes"])
    if "gradient_accumulation_steps" not in values and "global_batch_size" not in values:
        at_once = int(values["per_device_batch_size"][0]) * int(values.get("nproc", ["1"])[0]) * nodes
        values["gradient_accumulation_steps"] = ["1" if kind == "grpo" else str(max(1, -(-_WHOLE_BATCH // at_once)))]
    several = values.get("gradient_accumulation_steps", [])
    if kind == "kto" and values.get("per_device_batch_size") == ["1"] and not any(int(n) % 2 for n in several):
        values["per_device_batch_size"] = ["2"]
        several[:] = [str(int(n) // 2) for n in several]
        notes.append("kto needs two rows per micro-batch: it gets two, and half as many micro-batches per step")
    if holds_out(values) and "eval_steps" not in values:  # ms-swift evaluates when it saves
        often = values.pop("eval_strategy", values.get("save_strategy", ["steps"]))
        if often == ["steps"]:
            values["eval_steps"] = values.get("save_steps", ["500"])
        else:
            values["eval_strategy"] = often
    if answers(values):
        values.setdefault("max_new_tokens", ["64"])
        if values.setdefault("answer_metrics", NLG) == NLG:
            notes.append("nlg stands for rouge_l and sacrebleu's bleu here, which split words differently")
    if "max_length" not in values:
        most = longest(values["model"][0]) if "model" in values else None
        if most is None:
            notes.append("--max-length defaults to 1024; in ms-swift, to the model's context length")
        else:
            values["max_length"] = [str(most)]
    if kind in ("grpo", "ppo"):
        notes.append("prompts longer than --max-length are left out here; ms-swift cuts off their beginning")


def _leave_out_what_does_nothing(values: dict[str, list[str]], notes: list[str]) -> None:
    """Leave out options that ms-swift silently ignores, and that are refused here since they would have no effect."""
    idle = {"full": OF_ADAPTERS, "lora": ("tuner_arguments",)}.get(values["tuner"][0].lower(), ONLY_LORA)
    if values["gradient_checkpointing"][:1] in (["no"], ["false"]):
        idle = (*idle, "checkpointing_reentrant")
    if "optimizer" not in values:
        idle = (*idle, "optimizer_arguments")
    if is_on(values, "packing"):
        idle = (*idle, "padding_free")
    if values.get("rlhf_type", ["dpo"])[0] in REWARDED:  # an epoch has full batches of answers
        idle = (*idle, "drop_last")
    if values.get("task", [""])[0] not in OF_TASK:
        idle = (*idle, *OF_TASK["reranker"])
    if values.get("vllm_mode") != ["colocate"]:
        idle = (*idle, "vllm_sleep")
    of_answers = OF_ANSWERS if "rlhf_type" not in values else ()  # in rlhf answers are trained on
    if not answers(values):
        idle = (*idle, *of_answers)
    if not (is_on(values, "keep_best") or "early_stop" in values):
        idle = (*idle, "best_metric")
    if values.get("sequence_parallel", ["1"]) != ["1"]:
        if is_on(values, "liger_kernel"):
            values.setdefault("chunked_loss", ["yes"])
        notes += [
            f"{options.flag(name)} {' '.join(values.pop(name))} is left out: {why}"
            for name, why in OF_WHOLE_ROWS.items()
            if name in values
        ]
    if not holds_out(values) and not {"keep_best", "early_stop"} & set(values):
        notes += [
            f"{options.flag(name)} {' '.join(values.pop(name))} is left out: there are no rows to evaluate on"
            for name in (*EVALUATIONS, *of_answers)
            if name in values
        ]
    notes += [
        f"{options.flag(name)} {' '.join(values.pop(name))} is left out: it would have no effect"
        for name in idle
        if name in values
    ]
