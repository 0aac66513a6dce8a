"""Tools and tool calls, as people write them, and the form that chat templates expect: objects with a function's name
and its other fields under `function`."""

from __future__ import annotations

import json
from typing import Any

from shardproof.data.forms.parts import Problem
from shardproof.data.forms.written import read_out


def called(content: Any, at: str) -> list[dict[str, Any]]:
    """Tool calls as ms-swift and LLaMA-Factory write them, a JSON object with `name` and `arguments` or a list of
    these."""
    try:
        found = json.loads(content) if isinstance(content, str) else content
        calls = [(call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])]
        return [
            {"type": "function", "function": {"name": name, "arguments": json.loads(x) if isinstance(x, str) else x}}
            for name, x in calls
        ]
    except (ValueError, TypeError, KeyError):
        raise Problem(f"the content of {at} is not a JSON object with 'name' and 'arguments'") from None


def turns_of_blocks(turn: Any) -> list[Any]:
    """A turn in Anthropic's format, whose content has tool calls (`tool_use`) or their results (`tool_result`),
    converted to our turns; any other turn unchanged."""
    content = turn.get("content") if isinstance(turn, dict) else None
    blocks = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    if not calls and not any(block.get("type") == "tool_result" for block in blocks):
        return [turn]
    made: list[dict[str, Any]] = []
    for block in content or ():
        if isinstance(block, dict) and block.get("type") == "tool_result":
            made.append({"role": "tool", "content": block.get("content") or ""})
        elif block not in calls:
            if not made or made[-1]["role"] == "tool":
                made.append({**turn, "content": []})
            made[-1]["content"].append(block)
    if calls:
        said = made[-1] if made and made[-1]["role"] != "tool" else {**turn, "content": ""}
        made = [
            *(one for one in made if one is not said),
            {**said, "tool_calls": [_of_block(block) for block in calls]},
        ]
    return made


def _of_block(block: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise Problem("a part of type 'tool_use' has no 'name'")
    return {"type": "function", "function": {"name": block["name"], "arguments": block.get("input") or {}}}


def with_objects(calls: Any, at: str) -> list[dict[str, Any]]:
    """The `tool_calls` of the turn at `at`, with arguments as objects: OpenAI writes them as JSON strings, which most
    templates would encode as JSON again."""
    calls = read_out(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Problem(f"'tool_calls' of {at} must be a list of objects")
    return [_with_object(call) for call in calls]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def with_texts_as_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn with its arguments as JSON strings, for a template that concatenates them."""
    return {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text(call["function"])}
    if not isinstance(call.get("arguments"), dict):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def functions(tools: list[Any]) -> list[Any]:
    """The tools of a row as objects, even if they are written as JSON strings or without `function`."""
    return [_function(tool, i) for i, tool in enumerate(tools)]


def _function(tool: Any, index: int) -> Any:
    tool = read_out(tool)
    if not isinstance(tool, dict):
        raise Problem(f"tools[{index}] is not a JSON object that describes a function")
    if "function" in tool or "name" not in tool or tool.get("type", "function") != "function":
        return tool
    # Anthropic has another name for the schema of a function's parameters.
    named = {"parameters" if name == "input_schema" else name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": named}
