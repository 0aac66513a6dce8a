"""Which hub ms-swift fetches models and datasets from, and pushes to: ModelScope's unless Hugging Face's is chosen."""

from __future__ import annotations

from dataclasses import replace

from shardproof.cli.from_swift.environment import HUB
from shardproof.cli.from_swift.missing import is_on
from shardproof.cli.from_swift.shell import Line
from shardproof.data.sources import modelscope
from shardproof.data.sources.hub import hub_name

MODELS = ("model", "model_id_or_path", "ref_model", "reward_model", "teacher_model")
DATASETS = ("dataset", "val_dataset", "chord_sft_dataset")
ADAPTERS = ("adapters", "ref_adapters")
PUSHED = "hub_model_id"
TOKEN = "hub_token"

TOLD = (
    "MS:: before a name stands for ModelScope's hub, which ms-swift uses unless USE_HF=1 or --use_hf true is given: "
    "pip install 'shardproof[modelscope]', or leave MS:: out for Hugging Face's"
)
ROWS = (
    "rows from a hub are read unchanged: the columns, subsets and code that ms-swift's registry has for some datasets "
    "do not exist here; 'shardproof data show' prints rows as the model will see them"
)


def with_hub(line: Line, notes: list[str]) -> Line:
    """The command with its hub before each name from a hub, and without a token, which must not be printed."""
    options = [(name, given) for name, given in line.options if name != TOKEN]
    if len(options) < len(line.options):
        notes.append("--hub-token is left out: set HF_TOKEN, which does not show up in process lists")
    if any(hub_name(_plain(source)) for name, given in options if name in DATASETS for source in given):
        notes.append(ROWS)
    notes += [
        f"--{name} {value}: there is no such folder here; fetch adapters from a hub first, with 'hf download' or "
        "'modelscope download'"
        for name, given in options
        for value in given
        if name in ADAPTERS and hub_name(value) is not None
    ]
    told = [is_on(given) for name, given in options if name == "use_hf"]
    if any(told) or is_on([line.variables.get(HUB, "0")]):
        return replace(line, options=options if told else [*options, ("use_hf", ["true"])])
    named = [(name, [_of_modelscope(name, value) for value in given]) for name, given in options]
    if named != options:
        notes.append(TOLD)
    return replace(line, options=named)


def _of_modelscope(option: str, value: str) -> str:
    if value[:4].upper() in ("HF::", modelscope.PREFIX):
        return value
    if option == PUSHED:
        is_named = value.lower() not in ("", "none")
    else:
        is_named = option in (*MODELS, *DATASETS) and hub_name(_plain(value)) is not None
    return modelscope.PREFIX + value if is_named else value


def _plain(source: str) -> str:
    """The name without the number of rows to take."""
    return source.partition("#")[0]
