"""Checks that a given chat template is valid Jinja, before there is a tokenizer to render it."""

from __future__ import annotations

import re

from shardproof.data.encoding.template import BUILT_IN, is_template, template_text
from shardproof.errors import ConfigError


def check_template(template: str) -> None:
    """Raise ConfigError for an invalid template: a file that cannot be read, or Jinja that cannot be parsed, with the
    line. `set_template` checks how it renders a conversation."""
    text = template_text(template)
    if template in BUILT_IN:
        return
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The settings of transformers; its own tags are removed, keeping their content and the line numbers.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_CONTROLS])
    try:
        environment.compile(re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", _same_lines, text))
    except TemplateSyntaxError as error:
        where = f"line {error.lineno} of the template" if is_template(template) else f"{template}:{error.lineno}"
        line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
        raise ConfigError(
            f"--chat-template: {where} is not valid Jinja: {str(error.message).rstrip('.')}.\nThe line is: {line:.200}"
        ) from error


_CONTROLS = "jinja2.ext.loopcontrols"


def _same_lines(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")
