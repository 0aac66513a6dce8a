"""Default values for the variables of a chat template: `--template-variables`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shardproof.errors import ConfigError

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}


def with_defaults(template: Any, variables: Mapping[str, str]) -> str:
    """A template with these defaults. Raises ConfigError if it does not use one of the variables, or is not a
    template."""
    if not isinstance(template, str):
        raise ConfigError("--template-variables: the tokenizer has no chat template, or several. Add --chat-template.")
    asked, lines = _asked_for(template), []
    for name, value in variables.items():
        if name not in asked or name in _GIVEN:
            raise ConfigError(f"--template-variables {name}={value}: the chat template has no variable {name!r}.")
        plain = value.lower() in ("true", "false", "none") or re.fullmatch(r"-?\d+(\.\d+)?", value)
        meant = value.lower() if plain else json.dumps(value, ensure_ascii=False)
        lines.append(f"{{%- if {name} is not defined %}}{{% set {name} = {meant} %}}{{% endif %}}")
    return "".join(lines) + template


def with_prefix(template: Any, prefix: str) -> str:
    """A template whose generation prompt ends with a text. Raises ConfigError if it is not a template."""
    if not isinstance(template, str):
        raise ConfigError("--response-prefix: the tokenizer has no chat template, or several. Add --chat-template.")
    text = json.dumps(prefix, ensure_ascii=False)
    return f"{template}{{%- if add_generation_prompt %}}{{{{- {text} }}}}{{%- endif %}}"


def _asked_for(template: str) -> set[str]:
    """The variables that a template expects to be given."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag of transformers
    try:
        found = meta.find_undeclared_variables(environment.parse(text))
    except TemplateSyntaxError:  # reported with its line when the template is used
        return set(re.findall(r"\w+", template))
    # Variables set by an earlier default count, too.
    return found | set(re.findall(r"if (\w+) is not defined %\}", template))
