"""Adapters that training begins with: those of another run, or a folder of PEFT's. What they are takes the place of
the options that would say it of new ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from shardproof.checkpoint.manifest import MANIFEST
from shardproof.errors import ConfigError, exported
from shardproof.models.families.anatomy import anatomy
from shardproof.models.loading.weight_files import weight_map
from shardproof.models.loading.whole_files import OF_ADAPTERS, check_whole_files
from shardproof.train.adapters.kinds import IDLE, OURS
from shardproof.train.adapters.targets import ALL
from shardproof.train.folder import ADAPTER, MODEL, base_of, other_weights
from shardproof.train.model.changes import CHANGES, TOKENS, changed_by, read_whole, tokens_of
from shardproof.train.model.loading import BESIDE, NEVER_MERGED, check_base, first_line, said_of
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import REFERRED, SAME, RlhfConfig
from shardproof.train.options.tuners import ADALORA, KINDS, LORA

Config = TypeVar("Config", bound=RunConfig)

# Our options by PEFT's names, of all adapters and of LoRA.
OF_ANY = {name: name for name in ("target_modules", "modules_to_save")}
OPTIONS = {
    **OF_ANY,
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "target_parameters": "target_parameters",
    "lora_dropout": "lora_dropout",
}
# Ways to begin that change the weights, and those that do it otherwise each time.
CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
BY_CHANCE = ("pissa_niter", "corda", "lora_ga")
FREE = ("lora_dropout",)  # may be another one from here on


def adapter_folder(named: str, option: str = "--adapters") -> Path:
    """The folder with the adapters that an option names: itself, or that of a run.

    Raises:
        ConfigError: there is none, or it holds something else.
    """
    path = Path(named).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"{option} {named}: there is no such folder. Name a run of adapters, or a folder with an {ADAPTER}; to"
            f" fetch one from the hub: 'hf download OWNER/NAME --local-dir FOLDER'."
        )
    if (path / MANIFEST).is_file():
        raise ConfigError(
            f"{option} {named} is a checkpoint. Continue its run with --resume {shlex.quote(str(named))}, or export"
            f" it as a model: {exported(named)}."
        )
    folder = path / MODEL if (path / MODEL / ADAPTER).is_file() else path
    if not (folder / ADAPTER).is_file():
        whole = path / MODEL if (path / MODEL / "config.json").is_file() else path
        model = f" It is a whole model: --model {whole} begins with it." if (whole / "config.json").is_file() else ""
        raise ConfigError(f"{option} {named}: there is no {ADAPTER} in it.{model}")
    if not any((folder / name).is_file() for name in OF_ADAPTERS):
        raise ConfigError(f"{option} {named}: there is no {OF_ADAPTERS[0]} beside its {ADAPTER}.")
    check_whole_files(folder)
    said = said_of(folder)
    kind = str(said.get("peft_type"))
    if kind.lower() not in (LORA, *KINDS) or (kind.lower() == ADALORA and option != "--adapters"):
        instead = f"They are {NEVER_MERGED}" if kind in BESIDE else f"Merge them first: {exported(named)}"
        raise ConfigError(f"{option} {named}: these are {kind}, whose training cannot be continued here. {instead}.")
    if (begun_as := str(said.get("init_lora_weights")).lower()).startswith(CHANGING):
        raise ConfigError(f"{option} {named}: {not_of_base(begun_as)}")
    if begun_as == "mica":
        raise ConfigError(f"{option} {named}: MiCA trains one of its two matrices, but these train both.")
    return folder


def not_of_base(begun_as: str) -> str:
    """What is wrong with adapters that were saved as they are, and what to do."""
    return (
        f"they have begun as {begun_as}, which changes the weights, and fit only these. Save them by PEFT's"
        " save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...), which turns them into adapters of the"
        " weights as they were."
    )


def begun(config: Config) -> Config:
    """The options of a run with --adapters, with those that its adapters decide written out.

    Raises:
        ConfigError: they are no LoRA adapters, or an option that was given says something else of them.
    """
    if config.adapters is None:
        return config
    folder = adapter_folder(config.adapters)
    given = config.model_fields_set
    if config.tuner == "full" and "tuner" in given:
        raise ConfigError(
            "--adapters and --tuner full: with adapters, the model itself is not trained. To train all of it, merge"
            f" them first: {exported(config.adapters)}."
        )
    said = said_of(folder)
    together = [name for name in ("packing", "padding_free") if getattr(config, name, False)]
    if said.get("alora_invocation_tokens") and together:
        raise ConfigError(
            f"--adapters {config.adapters}: they start at tokens (alora_invocation_tokens) that PEFT looks for once"
            f" per row of a batch. Leave {flag(together[0])} out."
        )
    kind = str(said["peft_type"]).lower()
    found: dict[str, Any] = {"tuner": kind, "adapters": str(folder.absolute())}
    if "tuner" in given and config.tuner != kind:
        raise ConfigError(
            f"--adapters {config.adapters} and --tuner {config.tuner}: they are {kind}. Leave --tuner out."
        )
    if "model" not in given:
        found["model"] = base_of(folder)
        check_base(folder, found["model"], folder / ADAPTER)
    if kind != LORA:
        found["tuner_arguments"] = _arguments(config, said, kind)
    for theirs, ours in (OPTIONS if kind == LORA else OF_ANY).items():
        value = _in_our_words(ours, said.get(theirs), type(config))
        if ours in given and ours not in FREE and not _agree(getattr(config, ours), value):
            raise ConfigError(
                f"--adapters {config.adapters} and {flag(ours)} {_words(getattr(config, ours))}: they were made with"
                f" {_words(value)}, and stay so. Leave {flag(ours)} out."
            )
        if ours not in given or ours not in FREE:
            found[ours] = value
    return config.model_copy(update=found | _changes(config, folder))


def check_reference(config: RlhfConfig) -> None:
    """Raise ConfigError for --ref-adapters that cannot stand beside those that are trained: of another kind or, but for
    LoRA, made otherwise, as the reference is a copy of these that takes their values."""
    if config.adapters is None or config.ref_adapters in (None, SAME):
        return
    mine, theirs = (
        said_of(adapter_folder(named, option))
        for named, option in ((config.adapters, "--adapters"), (str(config.ref_adapters), "--ref-adapters"))
    )
    both = sorted(mine.keys() & theirs.keys() - OURS.keys()) if mine["peft_type"] != LORA.upper() else []
    for name in ("peft_type", *both):
        if mine[name] != theirs[name] and "init" not in name and "dropout" not in name:
            raise ConfigError(
                f"--ref-adapters {config.ref_adapters}: they were made with {name}={theirs[name]}, and those of"
                f" --adapters with {mine[name]}. Both must match. Name matching ones, or leave it out: the reference"
                f" is then --adapters before training."
            )


def _arguments(config: RunConfig, said: dict[str, Any], kind: str) -> dict[str, str]:
    """--tuner-arguments that these adapters were made with.

    Raises:
        ConfigError: others are given.
    """
    made = {name: value if isinstance(value, str) else json.dumps(value) for name, value in said.items()}
    for name, value in config.tuner_arguments.items():
        if made.get(name) != value:
            raise ConfigError(
                f"--adapters {config.adapters} and --tuner-arguments {name}={value}: they were made with"
                f" {made.get(name, 'no such argument')}, and stay so. Leave it out."
            )
    return {name: value for name, value in made.items() if name not in (*OURS, *IDLE.get(kind, ()))}


def other_bases(config: RunConfig) -> list[str]:
    """Of adapters that were trained on another model than --model, as far as names say: what to look at. Of one whose
    folder was moved the name is the same, and nothing is said."""
    told: dict[Path, str] = {}  # by folder: both options may name one
    for option in ("adapters", "ref_adapters"):
        named = getattr(config, option, None)
        if not named or not Path(named).expanduser().is_dir():  # what --ref-adapters calls the same
            continue
        folder = adapter_folder(named, flag(option))
        base = said_of(folder).get("base_model_name_or_path")
        if folder.resolve() in told:
            continue
        if base and not _one_model(base_of(folder), config.model):
            told[folder.resolve()] = (
                f"{flag(option)} {named} were trained on {base}, and --model is {config.model}: on other weights they"
                " give something else. If it is not the same model in another place, name that one, or leave --model"
                " out."
            )
        elif changed := other_weights(folder.parent, config.model):
            told[folder.resolve()] = changed
    return [*told.values()]


def _one_model(base: str, model: str) -> bool:
    """Whether these may be names of one model: one folder, or one name where not both are folders on this machine."""
    places = [Path(named).expanduser() for named in (base, model)]
    if all(place.is_dir() for place in places):
        return places[0].resolve() == places[1].resolve()
    return _name(base) == _name(model)


def _name(named: str) -> str:
    """The name of a model without its place; the caches of hubs have it above the folder of a snapshot, and
    ModelScope's writes a dot as three lines."""
    cached = [part for part in Path(named).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(named).name).replace("___", ".").casefold()


def _in_our_words(option: str, value: Any, config: type[RunConfig]) -> Any:
    if value is None:
        return ALL if option == "target_modules" else config.model_fields[option].default
    if option == "target_modules" and isinstance(value, str):
        return [value]
    return sorted(value) if isinstance(value, list) else value


def _agree(given: Any, made_with: Any) -> bool:
    """PEFT writes out what a name stands for."""
    if isinstance(given, list):
        return given == ALL or set(given) <= set(made_with)
    return bool(given == made_with)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _changes(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The options by which the run of these adapters has changed its model, which they need."""
    changed = changed_by(folder)
    found = {name: getattr(changed, name) for name in CHANGES if changed is not None and getattr(changed, name)}
    if found and config.command == "rlhf":
        raise ConfigError(
            f"--adapters {config.adapters}: their run has changed its model (--{next(iter(found)).replace('_', '-')})."
            f" Merge them first: {exported(config.adapters)}."
        )
    for name, value in found.items():
        given = getattr(config, name)
        if name in config.model_fields_set and (tokens_of(given) if name == TOKENS else given) != value:
            raise ConfigError(f"--adapters {config.adapters} were trained with another {flag(name)}. Leave it out.")
    return found


def check_task(folder: str, task: str) -> None:
    """Raise ConfigError for adapters of a model with another head. Those that do not say of which may be of any."""
    said = said_of(Path(folder)).get("task_type")
    if said not in (None, task):
        raise ConfigError(
            f"--adapters {folder} are of a model for {said}, and this run trains one for {task}. Merge them first:"
            f" {exported(folder)}."
        )


def with_trained_adapters(model: Any, config: RunConfig, task: str, parts: Sequence[str]) -> Any:
    """The model in the adapters of --adapters, of which those in `parts` of the model are to be trained on.

    Raises:
        ConfigError: they do not fit it, or none is in these parts.
    """
    from peft import PeftConfig, get_peft_model

    folder = str(config.adapters)
    check_task(folder, task)
    how: Any = PeftConfig.from_pretrained(folder)
    how.inference_mode = False
    if config.tuner == LORA:
        how.lora_dropout = config.lora_dropout
        how.init_lora_weights = True  # they have begun; other ways want weights that are to be read yet
    how.base_model_name_or_path = None  # where the model lies now, which PEFT fills in
    read_what_is_replaced(model, folder)
    try:
        model = get_peft_model(model, how)
    except ValueError as error:  # PEFT's, of names
        raise ConfigError(f"--adapters {folder} do not fit --model {config.model}: {first_line(error)}") from error
    if getattr(config, "rlhf_type", None) in REFERRED:
        _check_head(model, folder)
    give_values(model, folder, "--adapters", "default")
    how.inference_mode = config.tuner == ADALORA  # of which PEFT takes a second one, a reference, beside one of these
    part_of = anatomy(model).part_of
    trained = [(part_of[name], p) for name, p in model.named_parameters() if p.requires_grad]
    for part, p in trained:
        p.requires_grad_(part in parts)
    if not any(part in parts for part, _ in trained):
        there = ", ".join(dict.fromkeys(part for part, _ in trained))
        raise ConfigError(f"--adapters {folder}: they are in {there}, and what is trained is {', '.join(parts)}.")
    return model


def _check_head(model: Any, folder: str) -> None:
    """Raise ConfigError for adapters on the head, which trainers of TRL's that multiply by its weight pass over."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import TrainableTokensWrapper

    head = model.get_output_embeddings()
    if isinstance(head, (BaseTunerLayer, TrainableTokensWrapper)):
        name = next(name for name, module in model.get_base_model().named_modules() if module is head)
        raise ConfigError(
            f"--adapters {folder}: they are on the head, {name}, too, and TRL takes its weight without them."
            f" Merge them first: {exported(folder)}."
        )


def read_what_is_replaced(model: Any, folder: str | Path) -> None:
    """Of a model that is to be read yet, and to get the adapters of a folder, read those weights whole that PEFT has
    saved with them (embeddings that have adapters): it copies them into the place of the model's."""
    copied = [f".{name}." for name in said_of(Path(folder)).get("modules_to_save") or ()]  # beside the model's
    weights = dict(model.named_parameters(remove_duplicate=False))  # a head may be the embedding
    there = (weight_map(Path(folder), file, f"{file}.index.json") for file in OF_ADAPTERS)
    for name in chain.from_iterable(there):
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if own in weights and not any(part in f".{own}" for part in copied):
            read_whole(weights[own])


def give_values(model: Any, folder: str | Path, option: str, adapter: str) -> None:
    """Put the weights of a folder in the place of those of an adapter of the model.

    Raises:
        ConfigError: they are others than the adapter has.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    there = load_peft_weights(str(folder), device="cpu")
    needed = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    have = needed
    if there.keys() - needed:  # PEFT saves whole embeddings, too, where they have adapters or more rows than the base
        have = needed | get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=True)
    here = model.peft_config[adapter].modules_to_save or ()
    full = {*(said_of(Path(folder)).get("modules_to_save") or ())} - {*here}
    in_full = {name for name in there.keys() - needed.keys() if any(f".{module}." in name for module in full)}
    odd = sorted((there.keys() - have.keys()) | (needed.keys() - there.keys()) | in_full)
    odd += [name for name in there if name in have and there[name].shape != have[name].shape]
    if odd:
        name = odd[0]
        what = "is not in the files" if name not in there else "is not in the model"
        if name in there and name in have:
            what = f"is of shape {tuple(there[name].shape)} there and {tuple(have[name].shape)} here"
        if name in in_full:  # its place would be that of the model's own
            what = "is trained in full there, and not here"
        raise ConfigError(f"{option} {folder} do not fit the model: {name} {what}.")
    set_peft_model_state_dict(model, there, adapter_name=adapter)
