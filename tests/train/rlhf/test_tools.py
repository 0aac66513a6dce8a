"""Tools that rows bring: the model is shown those of each row, whichever algorithm asks it."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardproof.errors import ConfigError, DataError
from shardproof.models.chatml import CHATML
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.tools import load_tools
from shardproof.train.rlhf.variants import check_variant
from train.conftest import last_of_each
from train.rlhf.algorithms import prepared_for, series_of, series_without_room
from train.rlhf.vllm_of_transformers import found, series_with_vllm

pytestmark = pytest.mark.slow

SHOWS_TOOLS = "{{ 'Tools: ' + (tools | tojson) if tools }}" + CHATML


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def prompts_of(prepared: list[Any]) -> list[str]:
    """The prompts that this rank asks the model with in a run, as texts."""
    from shardproof.train.rlhf.generating import Generating

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


# --- functions that answers call (--tools) -----------------------------------------------------------

QUESTIONS = ["What is 1 plus 2?", "Hello!"]
ARGUMENTS = [{"a": 1, "b": 2}, {"a": 2, "b": 1}]
OWN_WORDS = (
    "{{ (tools | tojson) if tools }}{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}"
    "{{ (turn.tool_calls | tojson) if turn.tool_calls }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
FUNCTIONS = Path(__file__).with_name("tools_for_tests.py")


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt by heart to call `add` at one question, in one of two ways, and to answer another by
    itself."""
    import torch
    import trl
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import get_json_schema

    from shardproof.models.tiny import train_tokenizer
    from train.rlhf.tools_for_tests import add

    chats = []
    for arguments, hello in zip(ARGUMENTS, ("Hi.", "Good day."), strict=True):
        call = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
        turns = [{"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "3"}]
        asked, greeted = ([{"role": "user", "content": question}] for question in QUESTIONS)
        chats.append([*asked, *turns, {"role": "assistant", "content": "It is 3."}])
        chats.append([*greeted, {"role": "assistant", "content": hello}])
    shown = {"tools": [get_json_schema(add)]}
    tokenizer = train_tokenizer(QUESTIONS)
    tokenizer.chat_template = template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, **shown) for chat in chats]
    tokenizer = train_tokenizer(texts * 3)  # to which these are short
    tokenizer.chat_template = template
    rows = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **heads, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        model(**rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("caller")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def called(caller: Path, folder: Path, *more: str) -> list[str]:
    """A run in which one rank of two has questions that are calls only, and the other none."""
    rows = [{"query": query} for query in (*QUESTIONS, *QUESTIONS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--rlhf-type", "grpo", "--model", str(caller), "--dataset", str(folder / "rows.jsonl")]
    options += ["--reward-funcs", f"{FUNCTIONS}:by_place", "--tools", f"{FUNCTIONS}:add", "--num-generations", "2"]
    options += [
        "--temperature",
        "0.1",
        "--max-completion-length",
        "128",
        "--max-steps",
        "2",
        "--global-batch-size",
        "4",
    ]
    return [*options, "--learning-rate", "1e-4", *more]


@pytest.mark.parametrize(
    ("train", "sharing"),
    [
        *((train, 1) for train in (series_of, series_without_room, series_with_vllm)),
        pytest.param(series_of, 2, marks=pytest.mark.slow),
    ],
)
def test_answers_call_functions_and_go_on(pools: Any, caller: Path, tmp_path: Path, train: Any, sharing: int) -> None:
    """What functions return is in the answer and not learnt, and the numbers are those of one process, though one rank
    runs its model, or a vLLM of its own, for calls that the other does not have."""
    series = {}
    vllm = ["--use-vllm", "--vllm-mode", "colocate"] if train is series_with_vllm else []
    for world in (1, 2):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        shares = min(sharing, world)
        batch = ["--per-device-batch-size", str(4 * shares // world), "--sequence-parallel", str(shares)]
        with found():
            prepared = prepared_for(called(caller, tmp_path, *batch, *vllm), world, [{}], folder)
        series[world] = pools.run(world, train, prepared, timeout=300.0)[0][0]
        written = [json.loads(line) for line in (folder / "0/completions.jsonl").read_text().splitlines()]
        roles = {row["prompt"][0]["content"]: [turn["role"] for turn in row["completion"]] for row in written}
        assert roles == {QUESTIONS[0]: ["assistant", "tool", "assistant"], QUESTIONS[1]: ["assistant"]}
        of_calls = next(row["completion"] for row in written if len(row["completion"]) == 3)
        assert of_calls[1]["content"] == "3"
        assert of_calls[2]["content"] == "It is 3."
    for one, two in zip(series[1], series[2], strict=True):
        assert one["answers"] == two["answers"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert one["tools/call_frequency"] == two["tools/call_frequency"] == 0.5
    assert series[1][0]["grad_norm"] > 0.1


def test_so_many_calls_and_no_more(pools: Any, caller: Path, tmp_path: Path) -> None:
    """An answer whose second call is one too many ends there; how often is written down."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    options = called(caller, tmp_path, "--per-device-batch-size", "4", "--max-completion-length", "40")
    prepared = prepared_for(last_of_each(["rlhf", *options, "--max-tool-calling-iterations", "1"])[1:], 1, [{}], folder)
    (series,) = pools.run(1, series_of, prepared, timeout=300.0)[0]
    assert series[0]["tools/call_frequency"] == 0.5, "the call is made, and what it returns does not fit"
    written = [json.loads(line) for line in (folder / "0/completions.jsonl").read_text().splitlines()]
    assert all(len(row["completion"]) == 1 for row in written)


def told_of(prepared: list[Any]) -> list[str]:
    """What this rank warns of in a run."""
    import logging

    told: list[str] = []
    with mock.patch.object(logging.getLogger("shardproof"), "warning", lambda text, *args: told.append(text % args)):
        series_of(prepared)
    return told


@pytest.mark.slow
def test_calls_that_all_fail_are_told_once(pools: Any, caller: Path, tmp_path: Path) -> None:
    words = "All calls of --tools since the last log, up to step 1, failed, one with {'error': 'no network'}. The"
    for function, times in (("failing", 1), ("add", 0)):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        options = called(caller, tmp_path, "--per-device-batch-size", "2", "--tools", f"{FUNCTIONS}:{function}")
        prepared = prepared_for(last_of_each(["rlhf", *options])[1:], 2, [{}], folder)
        first, second = pools.run(2, told_of, prepared, timeout=300.0)
        assert [text.startswith(words) for text in first if "--tools" in text] == [True] * times
        assert not second


@pytest.mark.parametrize(
    "options, words",
    [
        (["--tools", "add"], "--tools add: name a function in a file, FILE.py:FUNCTION."),
        (["--tools", f"{FUNCTIONS}:subtract"], "has no function 'subtract'. It has: add, "),
        (["--tools", f"{FUNCTIONS}:add", f"{FUNCTIONS}:add"], "two functions are called add"),
        (
            ["--tools", f"{FUNCTIONS}:undescribed"],
            "because it has no docstring.\nThe model learns what",
        ),
        (["--tools", f"{FUNCTIONS}:untyped"], "its argument types: write both."),
        (
            ["--tools", f"{FUNCTIONS}:one_by_one"],
            "one_by_one: it is a generator, but a call has one result: use return.",
        ),
        (["--tools", f"{FUNCTIONS}:add", "--use-vllm"], "--tools and --use-vllm: TRL asks the server for all ranks"),
        (["--tools", f"{FUNCTIONS}:add", "--rlhf-type", "rloo"], "--tools does not apply to --rlhf-type rloo"),
        (["--tools", f"{FUNCTIONS}:add", "--chat-template", "chatml"], "does not support function calls"),
        (["--tools", f"{FUNCTIONS}:add", "--chat-template", "TEMPLATE"], "TRL cannot parse function calls in the chat"),
        (
            ["--tools", f"{FUNCTIONS}:add", "--dataset", "OWN"],
            "it has its own tools, which cannot be run, and --tools names",
        ),
        (
            ["--tools", f"{FUNCTIONS}:add", "--dataset", "TEXT"],
            "it is plain text, and functions are only called in conv",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(caller: Path, tmp_path: Path, options: list[str], words: str) -> None:
    rows = {"OWN": {"query": "?", "tools": [tool("city")]}, "TEXT": {"prompt": "Once upon"}}
    files = {name: f"{json.dumps(row)}\n" * 2 for name, row in rows.items()} | {"TEMPLATE": OWN_WORDS}
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    more = [str(tmp_path / f"{option}.jsonl") if option in files else option for option in options]
    with pytest.raises((ConfigError, DataError), match=re.escape(words)):
        prepared_for(last_of_each(["rlhf", *called(caller, tmp_path), *more])[1:], 1, [{}], tmp_path / "out")


def test_lists_that_functions_return_are_told() -> None:
    """As text: templates of models of text write down nothing of a list, also where it is made of parts of a turn."""
    from transformers.utils import get_json_schema

    names = ("near", "near_later", "parts", "places", "picture")
    near, later, parts, places, picture = load_tools([f"{FUNCTIONS}:{name}" for name in names])
    assert near(2) == asyncio.run(later(2)) == "[1, 3]"
    assert parts(2) == "2"
    assert places(2) == "[{'type': 'inn', 'rooms': 2}]"
    with pytest.raises(ValueError, match="it returned an image, but answers can continue with text only"):
        picture(2)
    assert get_json_schema(near)["function"]["parameters"]["required"] == ["a"]


def test_a_function_that_wants_to_end_the_process_has_failed() -> None:
    """TRL tells the model of Exceptions only; a run would end there, with the exit code that it gave. So would one
    whose function panics in Rust."""
    at_once, later, panics = load_tools([f"{FUNCTIONS}:{name}" for name in ("leaves", "leaves_later", "panics")])
    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        at_once(0)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        asyncio.run(later(3))
    with pytest.raises(RuntimeError, match="BaseException: index out of bounds"):
        panics(0)


def test_half_a_character_is_told_as_a_mark() -> None:
    """A tokenizer takes none: the run ended in its words, which name no function."""
    (half,) = load_tools([f"{FUNCTIONS}:half"])
    assert half(0) == "caf?"


def test_functions_that_call_themselves_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"near .*:also_near: both functions have the __name__ _near"):
        load_tools([f"{FUNCTIONS}:near", f"{FUNCTIONS}:also_near"])


def test_how_often_to_call_means_nothing_without_functions() -> None:
    options = {"rlhf_type": "grpo", "reward_funcs": ["length"], "max_tool_calling_iterations": 2}
    with pytest.raises(ConfigError, match="--max-tool-calling-iterations has no effect without --tools"):
        check_variant(RlhfConfig(model="x", dataset=["x"], **options))
