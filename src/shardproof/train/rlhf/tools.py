"""Functions that the model may call while it generates an answer (--tools in grpo).

TRL describes them to the model through its chat template, runs the calls in an answer, and has the model continue with
the results until there are no more calls. Results are part of the answer but are not learned.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.model.loading import first_line, tokenizer_of
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.functions import check_there, function_of, is_in_file
from shardproof.train.rlhf.reward_calls import NOT_ITS_OWN
from shardproof.train.rlhf.vllm import together_by

OPTION = "--tools"


def check_tools(config: RlhfConfig) -> None:
    """Raise ConfigError for a function that does not exist, without running any code."""
    check_named(config, OPTION, "function", "two functions are called {}, and the model could not tell them apart")


def check_named(config: RlhfConfig, option: str, word: str, twice: str) -> None:
    """Raise ConfigError for a function or class that answers cannot call. `twice`: why names have to differ."""
    named: list[str] = getattr(config, option.removeprefix("--"))
    for name in named:
        if not is_in_file(name):
            raise ConfigError(f"{option} {name}: name a {word} in a file, FILE.py:{word.upper()}.")
        check_there(option, name, word)
    together = together_by(config)
    if named and together:
        raise ConfigError(
            f"{option} and {together}, but some ranks would need more rounds of calls than others, which would not"
            f" join the request. Leave one of them out."
        )
    names = [name.rpartition(":")[2] for name in named]
    again = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if again:
        raise ConfigError(f"{option}: {twice.format(again)}.")


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions, with their results as text.

    Raises:
        ConfigError: as in `descriptions`.
    """
    descriptions(names)
    return [telling(function_of(OPTION, name)) for name in names]


def telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its result as text: TRL treats lists as the parts of a turn, which the chat templates of text
    models do not render. A function that tries to exit the process has failed like any that raises, and so has a panic
    in Rust, which is not an Exception."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with _staying():
                return _as_text(await function(*args, **kwargs))

        return later

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        with _staying():
            return _as_text(function(*args, **kwargs))

    return now


@contextlib.contextmanager
def _staying() -> Iterator[None]:
    try:
        yield
    except (Exception, *NOT_ITS_OWN):
        raise
    except BaseException as end:
        raise RuntimeError(f"{type(end).__name__}: {end}") from end


def _as_text(value: Any) -> str:
    """Raises ValueError for an image, which the model sees like any other failure of a call."""
    parts = value if isinstance(value, list) and value and all(isinstance(part, dict) for part in value) else []
    if any(part.get("type") == "image" and "image" in part for part in parts):
        raise ValueError("it returned an image, but answers can continue with text only")
    if parts and all(part.get("type") == "text" and "text" in part for part in parts):
        return whole_text("".join(str(part["text"]) for part in parts))
    return whole_text(str(value))


def whole_text(text: str) -> str:
    """The text with '?' in place of lone surrogates (from a file name that is not UTF-8), which tokenizers do not
    accept."""
    return text.encode(errors="replace").decode()


def descriptions(names: Sequence[str]) -> list[dict[str, Any]] | None:
    """The descriptions of these functions for chat templates, or None if there are none.

    Raises:
        ConfigError: a file fails when it is run, a function lacks a docstring or types of arguments, or two have the
            same `__name__`, by which the model calls them.
    """
    found = [description_of(OPTION, name, function_of(OPTION, name)) for name in names]
    named: dict[str, str] = {}
    for name, description in zip(names, found, strict=True):
        own = own_name(description)
        if own in named:
            raise ConfigError(
                f"{OPTION} {named[own]} {name}: both functions have the __name__ {own}, so the model could not tell"
                f" them apart."
            )
        named[own] = name
    return found or None


def own_name(description: dict[str, Any]) -> str:
    """The name by which the model calls the function."""
    return str(description["function"]["name"])


def description_of(option: str, name: str, function: Any) -> dict[str, Any]:
    """The description of a function for chat templates.

    Raises:
        ConfigError: it has no usable docstring and types, or is a generator.
    """
    from transformers.utils import get_json_schema

    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{option} {name}: it is a generator, but a call has one result: use return.")

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # it raises several types of its own
        why = first_line(error).rstrip(".!")
        raise ConfigError(
            f"{option} {name}: {why}.\nThe model learns what a function does from its docstring (Google style, with"
            f" 'Args:') and its argument types: write both."
        ) from error


def check_called(config: RlhfConfig, processing: Any) -> None:
    """Raise ConfigError for a chat template without function calls, or whose calls TRL cannot parse."""
    option = OPTION if config.tools else "--environments"
    if not (config.tools or config.environments):
        return
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    tokenizer = copy.copy(tokenizer_of(processing))
    if not supports_tool_calling(tokenizer):
        raise ConfigError(
            f"{option}: the chat template of {config.model} does not support function calls and their results. Use a"
            f" model that was trained for them, or give such a template with --chat-template."
        )
    try:
        if (
            getattr(tokenizer, "response_template", None) is None
            and getattr(tokenizer, "response_schema", None) is None
        ):
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ConfigError(
            f"{option}: TRL cannot parse function calls in the chat template of {config.model}. It knows the"
            f" published templates of Qwen2.5, Qwen3, Llama 3.1, gpt-oss, GLM-4 and others."
        ) from error
