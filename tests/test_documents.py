"""Promise: what README and the pages show can be typed: commands and options exist, Python compiles, JSON is JSON."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from shardproof.cli import data_encode, options
from shardproof.cli.main import COMMANDS
from shardproof.cli.table import parser_of

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "sh", "bash", "shell")


def blocks(page: Path, *languages: str) -> list[str]:
    """Also those that belong to a point of a list, and stand further in."""
    return [textwrap.dedent(text) for _, language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[list[str]]:
    """The words of each `shardproof` command of a page, without prompt, variables, comment and pipe."""
    found = []
    for text in blocks(page, *SHELLS):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:2>&1|\||>|&&|&)(?:\s|$)", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words and words[0] == "shardproof":
                    words = [word for word in words[1:] if word != "..."]
                    inner = words.index("--") if "--" in words else len(words)  # of submit: the command that it submits
                    found += [part for part in (words[:inner], words[inner + 1 :]) if part]
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=named)
def test_commands_are_read_by_the_parsers_that_run_them(page) -> None:
    for name, *words in commands(page):
        if name.startswith("-"):
            continue
        assert name in COMMANDS, f"shardproof {name}"
        if "--help" in words or name == "swift":
            continue
        if words[:1] == ["encode"]:
            recipe = words[1] if words[1] in data_encode.RECIPES else "sft"
            options.parse(data_encode.parser(recipe), words[1 + (words[1] == recipe) :])
            continue
        command = name if name in ("infer", "export") else ""
        options.parse(parser_of(name), words[words[:1] == ["show"] :], command=command)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "json")], ids=named)
def test_python_compiles_and_json_is_json(page) -> None:
    for text in blocks(page, "python"):
        compile(text, named(page), "exec")
    for text in blocks(page, "json"):
        rest = text.replace(", ...", "").strip()
        while rest:  # one object, or rows, one after the other
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].lstrip()


def slugs(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    text = BLOCK.sub("", page.read_text())
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        before = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{before}" if before else slug)
    return {*found, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)}


def links(page: Path) -> list[tuple[str, str]]:
    """Path and anchor of the links of a page that stay in the repository."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text()))
    targets = re.findall(
        r"\]\(([^)\s]+)(?: [^)]*)?\)|^\[[^\]]+\]: *(\S+)|(?:href|src)=\"([^\"]+)\"", text, re.MULTILINE
    )
    inside = [target for found in targets for target in found if target and not re.match(r"\w+:|//", target)]
    return [(path, anchor) for path, _, anchor in (target.partition("#") for target in inside)]


def test_headings_become_anchors_as_on_github(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `--model`, *said* plainly?\n\n## A [link](x.md) & more\n## 数据, 行\n## A link  more\n```\n# no\n```\n"
    )
    assert slugs(page) == {"--model-said-plainly", "a-link--more", "数据-行", "a-link--more-1"}


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=named)
def test_links_lead_somewhere(page) -> None:
    for path, anchor in links(page):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), path
        assert not anchor or there.suffix != ".md" or anchor in slugs(there), f"{path}#{anchor}"


def in_tables(page: Path) -> set[str]:
    """The options that the tables of a page name in code."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return {
        option for row in rows for code in re.findall(r"`([^`]+)`", row) for option in re.findall(r"--\w[\w-]*", code)
    }


def test_the_page_about_swift_has_the_same_options_in_both_languages() -> None:
    english, chinese = (ROOT / "docs" / folder / "moving-from-swift.md" for folder in ("", "zh"))
    assert in_tables(english) == in_tables(chinese)


def test_the_rows_that_are_shown_are_read(tmp_path) -> None:
    from shardproof.data.forms.formats import SFT
    from shardproof.data.rows import read_rows

    (rows,) = blocks(ROOT / "docs" / "rows.md", "json")
    (tmp_path / "rows.jsonl").write_text(rows)
    assert len(read_rows([tmp_path / "rows.jsonl"], form=SFT)) == len(rows.splitlines()) == 6


def test_the_reward_function_that_is_shown_is_one(tmp_path) -> None:
    from shardproof.train.rlhf.rewards import load_rewards

    (text,) = blocks(ROOT / "docs" / "rlhf.md", "python")
    (tmp_path / "my_rewards.py").write_text(text)
    (brevity,) = load_rewards([f"{tmp_path / 'my_rewards.py'}:brevity"], "", 1)
    completions = [[{"role": "assistant", "content": text}] for text in ("short", "long" * 100)]
    assert brevity(prompts=["", ""], completions=completions, completion_ids=[[1], [1]]) == [1.0, 0.0]
