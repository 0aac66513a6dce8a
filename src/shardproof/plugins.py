"""Models, row formats, losses, metrics, rewards, optimizers and callbacks from the user's own files.

A file registers its definitions under names, `--external-plugins my_file.py` runs it, and the option of that kind takes
the name:

    @shardproof.register_loss("focal")                        shardproof sft --external-plugins my_file.py --loss focal
    def focal(outputs, labels, num_items_in_batch): ...

[Note: where names go] A decorator registers with the `Plugins` that is being loaded, if any: importing a file in a
test, a notebook or a data worker only defines its functions, and names of one command never appear in another.
Definitions in a file can be pickled by reference, like those in any module: its folder stays on `sys.path`, and spawned
processes inherit that path.
"""

from __future__ import annotations

import contextvars
import difflib
import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shardproof.errors import ConfigError, ShardproofError, did_you_mean

T = TypeVar("T")

OPTION = "--external-plugins"


@dataclass(frozen=True)
class Kind:
    """A kind of plugin: the option that takes its names, and the built-in names."""

    option: str
    built_in: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


KINDS = {
    "model": Kind("--model-type"),
    "row format": Kind("--row-format"),
    "loss": Kind(
        "--loss",
        ("answer", "last_round", "all", "answer+ignore_empty_think", "last_round+ignore_empty_think"),
    ),
    "metric": Kind("--metrics"),
    "answer metric": Kind("--answer-metrics", ("exact_match", "accuracy", "rouge_l", "bleu", "chrf")),
    "reward": Kind("--reward-funcs", ("accuracy", "format", "length", "react_format", "toolbench")),
    "optimizer": Kind("--optimizer", ("adamw", "adamw_8bit", "muon", "galore", "adafactor")),
    "callback": Kind("--callbacks"),
}


class Plugins:
    """The registrations of the files of one command. Pickled as the names of the files, which are run again."""

    def __init__(self, files: Sequence[str] = ()) -> None:
        self.files = tuple(files)
        self._found: dict[tuple[str, str], tuple[Any, str]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (self.files,)

    def add(self, kind: str, name: str, value: Any, where: str) -> None:
        """Raises ConfigError for a name that is taken."""
        if name in KINDS[kind].built_in:
            raise ConfigError(f"the {kind} {name!r} is one of shardproof's own: register yours under another name")
        if (kind, name) in self._found:
            raise ConfigError(f"the {kind} {name!r} is already registered, at {self._found[kind, name][1]}")
        self._found[kind, name] = value, where

    def names(self, kind: str) -> list[str]:
        """The names of this kind, without the built-in ones."""
        return [name for of, name in self._found if of == kind]

    def find(self, kind: str, name: str) -> Any:
        """The value registered under this name, or None for a built-in name.

        Raises:
            ConfigError: there is no such name; the message has the nearest existing one.
        """
        if (kind, name) in self._found:
            return self._found[kind, name][0]
        if name in KINDS[kind].built_in:
            return None
        known = [*KINDS[kind].built_in, *self.names(kind)]
        hint = did_you_mean(name, known, 0.5)
        there = f"Known: {', '.join(known)}. " if known else ""
        mine = "FILE.py:FUNCTION is one of your own. " if kind == "reward" else ""
        files = " ".join(self.files) or "my_file.py"
        raise ConfigError(
            f"{KINDS[kind].option} {name}: there is no such {kind}.{hint}\n{there}{mine}"
            f'@shardproof.{_decorator(kind)}("{name}") in a file registers one, and {OPTION} {files} loads it.'
        )


def load(files: Sequence[str]) -> Plugins:
    """Run these files and return their registrations. The same files are run only once per process.

    Raises:
        ConfigError: a file is missing, fails, has the name of another module, or registers nothing; or two register the
            same name. The message names file and line.
    """
    check_files(files)
    return _load(tuple(dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files)))


def check_names(config: Any, plugins: Plugins) -> None:
    """Raise ConfigError for a name in the options of a run that is neither in `plugins` nor built in."""
    for kind, about in KINDS.items():
        if kind == "loss" and config.recipe != "sft":
            continue  # it is built into the task
        named = getattr(config, about.field, None)
        for name in named if isinstance(named, list) else [named] if named is not None else []:
            if not (kind == "reward" and ":" in name):
                plugins.find(kind, name)


def check_files(files: Sequence[str], option: str = OPTION) -> None:
    """Raise ConfigError for anything that is not a Python file, without running any."""
    for file in files:
        path = Path(file).expanduser()
        if path.is_dir():
            raise ConfigError(f"{option} {file} is a folder.\nName the Python files in it that register something.")
        if path.suffix != ".py":
            raise ConfigError(f"{option} {file}: a Python file (.py) is expected.")
        if not path.is_file():
            near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
            hint = f" Did you mean {path.with_name(near[0])}?" if near else ""
            raise ConfigError(f"{option} {file}: there is no such file.{hint}")


_LOADING: contextvars.ContextVar[Plugins | None] = contextvars.ContextVar("loading", default=None)


@functools.cache
def _load(files: tuple[str, ...]) -> Plugins:
    plugins = Plugins(files)
    token = _LOADING.set(plugins)
    try:
        for file in files:
            before = len(plugins._found)
            run_file(file, OPTION, taken=[Path(other).stem for other in files if other != file])
            if len(plugins._found) == before:
                raise ConfigError(
                    f"{OPTION} {file} registers nothing.\n"
                    f"It needs one of {', '.join('@shardproof.' + _decorator(kind) for kind in KINDS)}."
                )
    finally:
        _LOADING.reset(token)
    return plugins


def run_file(file: str, option: str, taken: Sequence[str] = ()) -> ModuleType:
    """Run a Python file as a module with its name, importable through its folder.

    Args:
        file: an absolute path.
        option: the option that named it, for error messages.
        taken: module names of the command's other files.

    Raises:
        ConfigError: it has the name of another module, or fails; the message has the line of the file.
    """
    path = Path(file)
    name = path.stem
    if "." in name or name in taken or _is_another(name, path):
        raise ConfigError(f"{option} {file}: a module {name!r} already exists.\nGive the file another name.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}: {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__plugin__"] = True
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{option} {_failure(error, path)}") from error
    return module


def _is_another(name: str, path: Path) -> bool:
    """Whether `import name` finds another file: then definitions in this one could not be found by name."""
    there = sys.modules.get(name)
    if there is not None:
        return "__plugin__" not in there.__dict__
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None and Path(found.origin) != path


def _failure(error: BaseException, path: Path) -> str:
    """The line of the user's file at which it failed, and the error."""
    said = str(error) if isinstance(error, ShardproofError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}: {error.msg}.\n  {(error.text or '').strip()}"
    here = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not here:
        return f"{path}: {said}."
    return f"{path}, line {here[-1].lineno}: {said}.\n  {here[-1].line}"


# --- what a plugin calls -----------------------------------------------------------------------------


def _decorator(kind: str) -> str:
    return f"register_{kind.replace(' ', '_')}"


def _register(kind: str, name: str) -> Callable[[T], T]:
    decorator = _decorator(kind)
    if not isinstance(name, str) or not name.strip() or name != name.strip() or ":" in name:
        raise ConfigError(f'@{decorator} needs a name in parentheses: @shardproof.{decorator}("name")')
    frame = sys._getframe(2)
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def register(value: T) -> T:
        if not callable(value):
            raise ConfigError(f'@{decorator}("{name}") decorates a function or a class, not a {type(value).__name__}')
        if (plugins := _LOADING.get()) is not None:
            plugins.add(kind, name, value, where)
        return value

    return register


def register_model(name: str) -> Callable[[T], T]:
    """Register a model class in transformers' style, or a function `(folder, **options)` that returns a model.

    The options are those of `from_pretrained`: `dtype`, and `attn_implementation` if --attn is given. It loads every
    model whose `config.json` has `name` as its `model_type`, or the class among its `architectures`, and `--model` if
    `--model-type name` is given. Its forward takes `labels` and `num_items_in_batch` (the tokens learned in the step,
    on all ranks), by which it divides the sum of its loss; or it leaves the loss to `--loss`.
    """
    return _register("model", name)


def register_row_format(name: str) -> Callable[[T], T]:
    """Register a function that converts a record of a file, a dict, into a form that shardproof knows.

    It returns a dict, with `messages` for example; it raises ValueError("why") if the row cannot be used.
    """
    return _register("row format", name)


def register_loss(name: str) -> Callable[[T], T]:
    """Register a function `(outputs, labels, num_items_in_batch)` that returns a scalar tensor.

    `outputs` is the model's output for the batch without labels; `labels`, int64 of shape (rows, length), is -100 where
    nothing is learned and not shifted yet. The loss is a sum over tokens divided by `num_items_in_batch`, the number of
    tokens learned in the step on all ranks: so it does not depend on how rows are distributed.
    """
    return _register("loss", name)


def register_metric(name: str) -> Callable[[T], T]:
    """Register a function `(outputs, labels)`, called for each batch of an evaluation, that returns a sum and a count.

    The sums of all batches and ranks divided by their counts are `eval_NAME`: exact on any number of processes.
    """
    return _register("metric", name)


def register_answer_metric(name: str) -> Callable[[T], T]:
    """Register a function `(answer, right)` of two texts, called for each row that a model answers in an evaluation,
    that returns a number. `eval_NAME` is the mean."""
    return _register("answer metric", name)


def register_reward(name: str) -> Callable[[T], T]:
    """Register a function `(completions, **columns)` that returns a number, or None, for each completion."""
    return _register("reward", name)


def register_optimizer(name: str) -> Callable[[T], T]:
    """Register an optimizer class in the style of torch.optim, or a function `(groups, lr)` that returns an optimizer;
    with a third argument `model` it also gets the model, for example to treat matrices and embeddings differently.

    `groups` are dicts of `params`, `weight_decay` and, if parts have their own learning rates, `lr`.
    """
    return _register("optimizer", name)


def register_callback(name: str) -> Callable[[T], T]:
    """Register a subclass of transformers' `TrainerCallback`, or a function without arguments that returns a callback,
    for each rank."""
    return _register("callback", name)
