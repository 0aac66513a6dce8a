"""Training that starts from existing adapters: those of another run, or a PEFT folder. Their configuration replaces the
options that would configure new adapters."""

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

# Our options by their PEFT names: for all adapters, and for LoRA.
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
# Initialisations that change the base weights, and those that do so differently each time.
CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
BY_CHANCE = ("pissa_niter", "corda", "lora_ga")
FREE = ("lora_dropout",)  # may change when training continues


def adapter_folder(named: str, option: str = "--adapters") -> Path:
    """The folder with the adapters that an option names: that folder itself, or the one inside a run.

    Raises:
        ConfigError: it does not exist, or holds something else.
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
        model = f" It is a full model: use --model {whole}." if (whole / "config.json").is_file() else ""
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
    """Why adapters that were saved without conversion cannot be used, and what to do."""
    return (
        f"they were initialised with {begun_as}, which changes the base weights, and fit only the changed ones. Save"
        " them with PEFT's save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...), which converts them"
        " to adapters for the original weights."
    )


def begun(config: Config) -> Config:
    """The options of a run with --adapters, including those that its adapters determine.

    Raises:
        ConfigError: they cannot be trained here, or a given option contradicts them.
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
                f" {_words(value)}, which cannot change. Leave {flag(ours)} out."
            )
        if ours not in given or ours not in FREE:
            found[ours] = value
    return config.model_copy(update=found | _changes(config, folder))


def check_reference(config: RlhfConfig) -> None:
    """Raise ConfigError for --ref-adapters that do not match the trained ones, since the reference is a copy of those
    which takes over their values: another kind of adapter or, except for LoRA, another configuration."""
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
    """The --tuner-arguments that these adapters were made with.

    Raises:
        ConfigError: different ones are given.
    """
    made = {name: value if isinstance(value, str) else json.dumps(value) for name, value in said.items()}
    for name, value in config.tuner_arguments.items():
        if made.get(name) != value:
            raise ConfigError(
                f"--adapters {config.adapters} and --tuner-arguments {name}={value}: they were made with"
                f" {made.get(name, 'no such argument')}, which cannot change. Leave it out."
            )
    return {name: value for name, value in made.items() if name not in (*OURS, *IDLE.get(kind, ()))}


def other_bases(config: RunConfig) -> list[str]:
    """Warnings about adapters that were trained on a model other than --model, judging by names. A model whose folder
    was moved keeps its name and gives no warning."""
    told: dict[Path, str] = {}  # by folder: both options may name the same one
    for option in ("adapters", "ref_adapters"):
        named = getattr(config, option, None)
        if not named or not Path(named).expanduser().is_dir():  # SAME of --ref-adapters is not a folder
            continue
        folder = adapter_folder(named, flag(option))
        base = said_of(folder).get("base_model_name_or_path")
        if folder.resolve() in told:
            continue
        if base and not _one_model(base_of(folder), config.model):
            told[folder.resolve()] = (
                f"{flag(option)} {named} were trained on {base}, but --model is {config.model}: on other weights they"
                " behave differently. Unless it is the same model in another place, name the original, or leave --model"
                " out."
            )
        elif changed := other_weights(folder.parent, config.model):
            told[folder.resolve()] = changed
    return [*told.values()]


def _one_model(base: str, model: str) -> bool:
    """Whether these may be the same model: the same folder, or the same name unless both are folders on this
    machine."""
    places = [Path(named).expanduser() for named in (base, model)]
    if all(place.is_dir() for place in places):
        return places[0].resolve() == places[1].resolve()
    return _name(base) == _name(model)


def _name(named: str) -> str:
    """The name of a model without its location. Hub caches have it above the snapshot folder, and ModelScope's cache
    writes a dot as three underscores."""
    cached = [part for part in Path(named).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(named).name).replace("___", ".").casefold()


def _in_our_words(option: str, value: Any, config: type[RunConfig]) -> Any:
    if value is None:
        return ALL if option == "target_modules" else config.model_fields[option].default
    if option == "target_modules" and isinstance(value, str):
        return [value]
    return sorted(value) if isinstance(value, list) else value


def _agree(given: Any, made_with: Any) -> bool:
    """Whether a given value matches the adapters'. PEFT expands names such as all-linear."""
    if isinstance(given, list):
        return given == ALL or set(given) <= set(made_with)
    return bool(given == made_with)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _changes(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The options with which the run of these adapters changed its model; the adapters depend on them."""
    changed = changed_by(folder)
    found = {name: getattr(changed, name) for name in CHANGES if changed is not None and getattr(changed, name)}
    if found and config.command == "rlhf":
        raise ConfigError(
            f"--adapters {config.adapters}: their run changed its model (--{next(iter(found)).replace('_', '-')})."
            f" Merge them first: {exported(config.adapters)}."
        )
    for name, value in found.items():
        given = getattr(config, name)
        if name in config.model_fields_set and (tokens_of(given) if name == TOKENS else given) != value:
            raise ConfigError(f"--adapters {config.adapters} were trained with another {flag(name)}. Leave it out.")
    return found


def check_task(folder: str, task: str) -> None:
    """Raise ConfigError for adapters of a model with another head. Adapters that do not name a task are accepted."""
    said = said_of(Path(folder)).get("task_type")
    if said not in (None, task):
        raise ConfigError(
            f"--adapters {folder} belong to a model for {said}, but this run trains one for {task}. Merge them first:"
            f" {exported(folder)}."
        )


def with_trained_adapters(model: Any, config: RunConfig, task: str, parts: Sequence[str]) -> Any:
    """The model with the adapters of --adapters; those in `parts` of the model are trained further.

    Raises:
        ConfigError: they do not fit the model, or none of them is in these parts.
    """
    from peft import PeftConfig, get_peft_model

    folder = str(config.adapters)
    check_task(folder, task)
    how: Any = PeftConfig.from_pretrained(folder)
    how.inference_mode = False
    if config.tuner == LORA:
        how.lora_dropout = config.lora_dropout
        how.init_lora_weights = True  # they are initialised already; other ways need weights that are not loaded yet
    how.base_model_name_or_path = None  # PEFT fills in where the model lies now
    read_what_is_replaced(model, folder)
    try:
        model = get_peft_model(model, how)
    except ValueError as error:  # from PEFT, about names
        raise ConfigError(f"--adapters {folder} do not fit --model {config.model}: {first_line(error)}") from error
    if getattr(config, "rlhf_type", None) in REFERRED:
        _check_head(model, folder)
    give_values(model, folder, "--adapters", "default")
    how.inference_mode = config.tuner == ADALORA  # so that PEFT accepts a second one, the reference
    part_of = anatomy(model).part_of
    trained = [(part_of[name], p) for name, p in model.named_parameters() if p.requires_grad]
    for part, p in trained:
        p.requires_grad_(part in parts)
    if not any(part in parts for part, _ in trained):
        there = ", ".join(dict.fromkeys(part for part, _ in trained))
        raise ConfigError(f"--adapters {folder}: they are in {there}, but the trained parts are {', '.join(parts)}.")
    return model


def _check_head(model: Any, folder: str) -> None:
    """Raise ConfigError for adapters on the head: TRL trainers that multiply by the head's weight ignore them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import TrainableTokensWrapper

    head = model.get_output_embeddings()
    if isinstance(head, (BaseTunerLayer, TrainableTokensWrapper)):
        name = next(name for name, module in model.get_base_model().named_modules() if module is head)
        raise ConfigError(
            f"--adapters {folder}: they are also on the head, {name}, but TRL uses its weight without them."
            f" Merge them first: {exported(folder)}."
        )


def read_what_is_replaced(model: Any, folder: str | Path) -> None:
    """Before adapters from a folder are added to a model that is not loaded yet, read in full those weights that PEFT
    saved with the adapters (embeddings that have adapters): PEFT copies the saved ones over the model's."""
    copied = [f".{name}." for name in said_of(Path(folder)).get("modules_to_save") or ()]  # beside the model's
    weights = dict(model.named_parameters(remove_duplicate=False))  # the head may be tied to the embedding
    there = (weight_map(Path(folder), file, f"{file}.index.json") for file in OF_ADAPTERS)
    for name in chain.from_iterable(there):
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if own in weights and not any(part in f".{own}" for part in copied):
            read_whole(weights[own])


def give_values(model: Any, folder: str | Path, option: str, adapter: str) -> None:
    """Load the weights from a folder into an adapter of the model.

    Raises:
        ConfigError: they do not match those of the adapter.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    there = load_peft_weights(str(folder), device="cpu")
    needed = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    have = needed
    if there.keys() - needed:  # PEFT also saves full embeddings that have adapters or more rows than the base
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
        if name in in_full:  # it would overwrite the model's own
            what = "is trained in full there, but not here"
        raise ConfigError(f"{option} {folder} do not fit the model: {name} {what}.")
    set_peft_model_state_dict(model, there, adapter_name=adapter)
