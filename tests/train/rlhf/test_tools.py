"""Tools that rows bring: the model is shown those of each row, whichever algorithm asks it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardproof.models.chatml import CHATML
from train.rlhf.algorithms import prepared_for, series_of

SHOWS_TOOLS = "{{ 'Tools: ' + (tools | tojson) if tools }}" + CHATML


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def prompts_of(prepared: list[Any]) -> list[str]:
    """The prompts that this rank asks the model with in a run, as texts."""
    from shardproof.train.generating import Generating

    asked: list[list[int]] = []
    tokenized = Generating._tokenize_prompts

    def heard(self: Any, prompts: Any) -> Any:
        found = tokenized(self, prompts)
        asked.extend(found[0])
        return found

    with mock.patch.object(Generating, "_tokenize_prompts", heard):
        series_of(prepared)
    return [prepared[0].tokenizer.decode(ids) for ids in asked]


@pytest.mark.parametrize(
    "kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow), pytest.param("ppo", marks=pytest.mark.slow)]
)
def test_the_prompt_of_a_row_shows_its_tools(pools: Any, models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    rows = [{"query": f"{name}?", "tools": [tool(name)]} for name in ("city", "river")]
    rows += [{"query": "none?"}, {"query": "text?", "tools": json.dumps([tool("text")])}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"rewards_{kind}_tools.py").write_text(
        "def chance(completions, tools, **columns):\n    return [0.0] * len(tools)\n"
    )
    (tmp_path / "template.jinja").write_text(SHOWS_TOOLS)
    options = ["--rlhf-type", kind, "--model", str(models["policy"]), "--dataset", str(tmp_path / "rows.jsonl")]
    options += [
        "--reward-funcs",
        f"{tmp_path}/rewards_{kind}_tools.py:chance",
        "--chat-template",
        str(tmp_path / "template.jinja"),
    ]
    options += ["--num-generations", "2", "--batch-size", "4", "--max-steps", "1", "--max-completion-length", "4"]
    prepared = prepared_for(options, 2, [{}], Path(tempfile.mkdtemp(dir=tmp_path)))
    asked = [text for texts in pools.run(2, prompts_of, prepared, timeout=300.0) for text in texts]
    assert len(asked) == 8
    for row in rows:
        name = row["query"].removesuffix("?")
        (ours,) = {text for text in asked if f"{name}?" in text}
        told = {word for word in ("city", "river", "text") if f'"{word}"' in ours.split("<|im_start|>")[0]}
        assert told == ({name} if "tools" in row else set())
