"""mkdocs hooks: pages generated from the program, and links that leave the docs folder.

Hooks rather than a plugin that writes files: mkdocs itself suffices.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from shardproof.cli.main import COMMANDS
from shardproof.cli.table import parser_of
from shardproof.doctor.known.errors import KNOWN

ROOT = Path(__file__).parents[2]
# Pages that are elsewhere in the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "zh/index.md": "README.zh-CN.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# By command: the lines below its name in the file.
_examples = Path(__file__).with_name("examples.sh").read_text()
EXAMPLES = dict(re.findall(r"^# (\w+)\n(.+?)\n(?=\n|\Z)", _examples, re.M | re.S))
THREAD = "https://github.com/{0}/issues/{1}"
MODULES = ("shardproof.zero.api", "shardproof.checkpoint.api")
INTEGRATIONS = ("transformers", "accelerate", "pretrained", "resume")


def on_config(config: Any) -> Any:
    """Fills the section of commands."""
    for entry in config.nav:
        if "Commands" in entry:
            entry["Commands"] = [{name: f"commands/{name}.md"} for name in COMMANDS]
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {f"commands/{name}.md": command_page(name) for name in COMMANDS}
    made |= {page: (ROOT / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    made |= {"troubleshooting.md": troubleshooting(), "api.md": interface()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to pages keep working, whichever folder they were written for; links to other files become plain text."""
    source = ROOT / ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = {str((ROOT / "docs" / file.src_uri).resolve()): file.src_uri for file in files}
    here |= {str(ROOT / there): name for name, there in ELSEWHERE.items()}
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found.group()
        known = here.get(str((source.parent / path).resolve()))
        if known is None:
            return text
        return f"{mark}[{text}]({up}{known}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)


def command_page(name: str) -> str:
    """The `--help` text of every group of options, and examples."""
    parser = parser_of(name)
    lines = [f"# shardproof {name}", "", escaped(parser.description or COMMANDS[name]), "", "```console"]
    lines += [f"$ shardproof {name} --help", parser.format_usage().strip(), "```", ""]
    lines += ["## Example", "", "```sh", EXAMPLES[name], "```", ""]
    for group in parser._action_groups:
        hidden = argparse.SUPPRESS, "show this help message and exit"
        rows = [row(action) for action in group._group_actions if action.help not in hidden]
        if rows:
            title = {"positional arguments": "Arguments", "options": "Options"}.get(group.title or "", group.title)
            lines += [f"## {title}", "", "| name | value | meaning |", "|---|---|---|", *rows, ""]
    if parser.epilog:
        lines += [escaped(parser.epilog), ""]
    return "\n".join(lines)


def row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    metavar = action.metavar if isinstance(action.metavar, str) and action.option_strings else ""
    value = ", ".join(f"`{choice}`" for choice in metavar.split("|")) if metavar else ""
    text = str(action.help or "").replace("%%", "%")
    return f"| {names} | {value} | {escaped(text)} |"


def escaped(text: str) -> str:
    """Terminal text as Markdown."""
    return re.sub(r"([|<>*_\[\]`])", r"\\\1", text)


def troubleshooting() -> str:
    """The errors that `shardproof explain` knows."""
    lines = ["# Troubleshooting by error message", ""]
    lines += ['`shardproof explain "TEXT"` finds the entry for a text. These are known, from public threads:', ""]
    for known in KNOWN:
        lines += [f"## {known.name}", "", f"*{known.engines}.* {escaped(known.means)}", ""]
        lines += ["Texts (regular expressions):", "", "```text", *known.patterns, "```", ""]
        for title, text in (("Why", known.why), ("What people do", known.there), ("Here", known.here)):
            lines += [f"**{title}.** {escaped(text)}", ""]
        threads = [f"[{name}]({THREAD.format(*name.split('#'))})" if "#" in name else name for name in known.threads]
        lines += [f"Threads: {', '.join(threads)}.", ""] if threads else []
    return "\n".join(lines)


def interface() -> str:
    """The docstrings of the public names."""
    lines = [
        "# Python interface",
        "",
        "`import shardproof` provides most names; integrations are imported by module.",
        "",
    ]
    for module in (*MODULES, *(f"shardproof.integrations.{name}" for name in INTEGRATIONS)):
        lines += [f"::: {module}", ""]
    return "\n".join(lines)
