"""A trained model, loaded for inference from a run folder, unsharded or sharded across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof.checkpoint.folder import complete
from shardproof.checkpoint.manifest import MANIFEST
from shardproof.data.forms.parts import Problem
from shardproof.errors import ConfigError, exported
from shardproof.integrations.four_bits import adopt
from shardproof.models.forward import without_adapters
from shardproof.models.loading.classes import with_values
from shardproof.models.loading.whole_files import check_whole_files
from shardproof.plugins import Plugins
from shardproof.train.adapters.begun import BY_CHANCE, CHANGING, not_of_base, read_what_is_replaced
from shardproof.train.folder import ADAPTER, CONFIG, MODEL, base_of, recorded_in, tell_other_weights
from shardproof.train.model.changes import changed_by, grow, stretching
from shardproof.train.model.loading import (
    WEIGHTS,
    check_base,
    first_line,
    load_processing,
    of_a_checkpoint,
    registered_model,
    said_of,
    tokenizer_of,
)
from shardproof.train.model.made_anew import note_not_read, noting, tell_made_anew
from shardproof.train.options.config import SftConfig
from shardproof.train.options.tuners import reads_weights

if TYPE_CHECKING:
    from shardproof.data.media.embed import MediaMatchEncoder
    from shardproof.data.rows import Row

T = TypeVar("T")


def model_folder(run: str) -> Path:
    """The folder with the weights of a run, or `run` itself if it is a model folder.

    Raises:
        ConfigError: there is nothing to load.
    """
    path = Path(run).expanduser()
    if not path.is_dir():
        raise ConfigError(f"There is no run folder {run}.")
    folder = path / MODEL if (path / MODEL).is_dir() else path
    if not any(next(folder.glob(pattern), None) for pattern in (*WEIGHTS, ADAPTER)):
        hint = " Did the run end before it could save?" if (path / CONFIG).is_file() else ""
        if (path / MANIFEST).is_file():
            hint = of_a_checkpoint(run, "name")
        elif hint and (kept := complete(path)):
            hint += f"\nIt has a checkpoint to make a model of: {exported(kept[-1], 'name')}."
        elif runs := [file.parent for file in path.glob(f"*/{CONFIG}")]:
            newest = max(runs, key=lambda each: each.stat().st_mtime)
            hint = f" It is a folder of {len(runs)} run(s): name one of them, such as {newest}, the newest."
        raise ConfigError(f"There are no weights in {folder}.{hint}")
    check_whole_files(folder)
    return folder


def loaded_as(folder: Path, plugins: Plugins, model_type: str | None = None) -> str | None:
    """`model_type`, or the one that the run of these weights loaded its model with; None if the folder is not from a
    run."""
    if model_type is not None or folder.name != MODEL:
        return model_type
    found = recorded_in(folder.parent).get("model_type")
    if isinstance(found, str) and found not in plugins.names("model"):
        registered_model(str(folder), plugins)  # raises if the config names a class that transformers does not know
    return found if isinstance(found, str) else None


def tell_lacking(model: Any, source: str, adapters: Path | None) -> None:
    """Warn about weights that are missing in the files of `source` and not replaced by the folder of `adapters`."""
    replaced = said_of(adapters).get("modules_to_save") if adapters is not None else None
    tell_made_anew(model, source, trained=False, but=replaced or ())


def on_base(model: Any, folder: Path, base: str) -> Any:
    """The model with the adapters from a folder, which were trained on `base` according to their config.

    Raises:
        ConfigError: they do not fit it.
    """
    from peft import PeftModel

    from shardproof.zero.build import READER

    begun_as = str(said_of(folder).get("init_lora_weights")).lower()
    is_whole = not any(READER in p.__dict__ for p in model.parameters())
    if begun_as.startswith(BY_CHANCE if is_whole else CHANGING):
        alone = "" if begun_as.startswith(BY_CHANCE) else " Or run it in one process, which changes them again."
        raise ConfigError(f"The adapters in {folder}: {not_of_base(begun_as)}{alone}")
    try:
        if not is_whole:
            read_what_is_replaced(model, folder)
        return PeftModel.from_pretrained(model, folder)
    except Exception as error:  # anything that PEFT and its libraries raise
        said = " ".join(str(error).split())
        raise ConfigError(f"The adapters in {folder} do not fit the model {base}: {said:.300}") from error


class Loaded:
    """A model and its tokenizer. Adapters are loaded on the model that they were trained on.

    Args:
        load: called with a folder or hub id and options, like `from_pretrained`; returns the model.
        stage: shard the model at this stage across the ranks of the process group, each of which reads its part; all
            ranks must then run it together. None loads the full model.

    Raises:
        ConfigError: something cannot be loaded.
    """

    model: Any

    def __init__(self, folder: Path, load: Callable[..., Any], trust_remote_code: bool, stage: int | None) -> None:
        self.folder, self.stage, self.sharded = folder, stage, stage is not None
        self._load, self._trusted = load, trust_remote_code
        self.processing = load_processing(str(folder), SftConfig(trust_remote_code=trust_remote_code))
        self.tokenizer = tokenizer_of(self.processing)

    @property
    def _inner(self) -> Any:
        """The model without the adapters on it."""
        return without_adapters(self.model)

    def load(self) -> None:
        """Load the model in eval mode, in full or without values at first."""
        from shardproof.integrations.pretrained import without_values

        folder = self.folder
        adapters = (folder / ADAPTER).is_file()
        whole = not self.sharded or (adapters and reads_weights(str(said_of(folder).get("peft_type")).lower()))
        how = noting(with_values) if whole else without_values
        source = base_of(folder) if adapters else str(folder)
        check_base(folder, source, folder / ADAPTER)
        if adapters and self.first:
            tell_other_weights(folder.parent, source)
        changes = changed_by(folder) if adapters else None
        change = {"change": found} if (found := stretching(changes)) else {}
        try:
            self.model = self._load(source, trust_remote_code=self._trusted, how=how, **change)
        except ConfigError:
            raise
        except Exception as error:  # anything that the loader of a format or the model's code raises
            what = f"The adapter's base model {source}" if adapters else f"The model in {folder}"
            raise ConfigError(f"{what} cannot be loaded: {first_line(error)}") from error
        adopt(self.model)
        if not whole:
            note_not_read(self.model)
        tell_lacking(self.model, source, folder if adapters else None)
        if adapters:
            if changes is not None and changes.new_special_tokens:
                grow(self.model, self.tokenizer)
            self.model = on_base(self.model, folder, source)
        self.model.eval()

    def place_model(self) -> None:
        """Shard the model across ranks, or move it to the accelerator, if there is one."""
        import torch

        from shardproof.integrations.transformers import shard_prepared

        if self.stage is not None:
            shard_prepared(self.model, self.stage, None, None)
            torch.manual_seed(self.shared(torch.initial_seed))
        elif torch.accelerator.is_available():
            self.model.to(torch.accelerator.current_accelerator())

    @property
    def first(self) -> bool:
        """Whether this rank is the one that talks to the user."""
        import torch.distributed as dist

        return not self.sharded or dist.get_rank() == 0

    def shared(self, ask: Callable[[], T]) -> T:
        """The result of `ask` on the first rank, on all ranks."""
        import torch.distributed as dist

        found: list[Any] = [ask() if self.first else None]
        if self.sharded:
            dist.broadcast_object_list(found)
        return found[0]

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        import torch.distributed as dist

        return (dist.get_rank(), dist.get_world_size()) if self.sharded else (0, 1)

    def told(self, mine: list[T]) -> list[T]:
        """The items of all ranks, in order of ranks, on all of them."""
        from shardproof.zero.comm.groups import all_gather_object

        return [one for theirs in all_gather_object(None, mine) for one in theirs] if self.sharded else mine


def with_files(encoder: MediaMatchEncoder, rows: Sequence[Row]) -> tuple[dict[str, Any], list[int]] | None:
    """The result of `batch_of`.

    Raises:
        ConfigError: a row cannot be read.
    """
    try:
        return encoder.batch_of(rows)
    except Problem as problem:
        raise ConfigError(f"{problem}.") from problem
