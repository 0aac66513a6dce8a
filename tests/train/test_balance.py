"""Promise: the loss that balances experts weighs the same whatever a step is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.encode import collate
from shardproof.data.encoding.pack import collate_packed
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.train.adapters.adding import check_named_parts
from shardproof.train.model.balance import term
from shardproof.train.model.loading import load_model, load_processing
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe
from train.test_export import experts

pytestmark = pytest.mark.slow

WEIGHT = 0.5
ROWS = [{"query": "count " * n, "response": "one two three " * n} for n in (1, 2, 3, 5)]


@pytest.fixture(scope="module")
def mixture(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experts(tiny, tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("four") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def runs(commands, sft, mixture: Path, four: Path):
    """Each row a micro-batch, so that how rows are dealt out makes no difference."""
    rows = ["--model", str(mixture), "--dataset", str(four), *"--max-steps 2 --global-batch-size 4".split()]
    base = sft(*rows, "--per-device-batch-size", "1", "--val-dataset", str(four), "--eval-on-start")
    weight = ["--router-aux-loss-coef", str(WEIGHT)]
    two = [*weight, "--nproc", "2", "--stage", "3"]
    return commands(
        [
            ("without", base),
            ("one", [*base, *weight]),
            ("two", [*base, *two]),
            ("again", [*base, *two, "--gradient-checkpointing"]),
            ("exact", [*base, *two, "--deterministic"]),
            ("weighed", [*base, *two, "--token-weights", "ignore_think_prefix"]),  # no row has such a thought
            ("weighed exactly", [*base, *two, "--deterministic", "--token-weights", "ignore_think_prefix"]),
        ]
    )


def balance(mixture: Path, four: Path) -> float:
    """The mean of transformers' term over the rows."""
    config = SftConfig(model=str(mixture), dataset=[str(four)])
    rows = recipe.encode(config, read_rows([str(four)]), load_processing(str(mixture), config))
    model: Any = load_model(str(mixture), config)
    inputs = [collate([rows[i]], pad_token_id=0) for i in range(len(rows))]
    with torch.no_grad():
        return sum(float(model(**batch, output_router_logits=True).aux_loss) for batch in inputs) / len(inputs)


def test_the_loss_has_the_mean_of_the_term(runs, mixture: Path, four: Path) -> None:
    assert all(run.code == 0 for run in runs.values()), runs["two"].output
    plain, balanced = runs["without"], runs["one"]
    added = balanced.series("loss")[0] - plain.series("loss")[0]
    assert added == pytest.approx(WEIGHT * balance(mixture, four), abs=1e-5)
    assert balanced.series("eval_loss")[0] == pytest.approx(plain.series("loss")[0], abs=1e-5), "without the term"


@pytest.mark.parametrize("name", ["two", "again", "exact", "weighed", "weighed exactly"])
def test_it_is_the_same_on_any_number_of_processes(runs, name: str) -> None:
    from safetensors.torch import load_file

    assert runs[name].series("loss") == pytest.approx(runs["one"].series("loss"), abs=1e-5)
    expected, plain, found = (
        load_file(runs[run].folder / "model" / "model.safetensors") for run in ("one", "without", name)
    )
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=3e-5, rtol=1e-4, msg=key)
    assert any((plain[key] - value).abs().max() > 1e-3 for key, value in expected.items() if ".mlp.gate." in key)


def test_what_fills_packed_rows_up_is_not_balanced(mixture: Path, four: Path) -> None:
    config = SftConfig(model=str(mixture), dataset=[str(four)], packing=True, max_length=50)
    rows = recipe.encode(config, read_rows([str(four)]), load_processing(str(mixture), config))
    model: Any = load_model(str(mixture), config)
    packs = [rows[i] for i in range(len(rows))]
    inputs = collate_packed(packs, pad_token_id=0)
    there = [inputs["input_ids"][i, : len(pack["input_ids"])] for i, pack in enumerate(packs)]
    places = [inputs["position_ids"][i, : len(ids)] for i, ids in enumerate(there)]
    whole = {"input_ids": torch.cat(there)[None], "position_ids": torch.cat(places)[None], "use_cache": False}
    assert whole["input_ids"].numel() < inputs["input_ids"].numel(), "some is padding"
    with torch.no_grad():
        expected = model(**whole, output_router_logits=True).aux_loss
        outputs = model(**inputs, output_router_logits=True)
    assert abs(outputs.aux_loss - expected) > 1e-3
    torch.testing.assert_close(term(model, inputs, outputs), expected, atol=1e-6, rtol=1e-6)


def test_the_model_is_saved_as_it_was_configured(runs, mixture: Path) -> None:
    names = ("output_router_logits", "router_aux_loss_coef")
    before, after = (json.loads((f / "config.json").read_text()) for f in (mixture, runs["one"].folder / "model"))
    assert [after[name] for name in names] == [before[name] for name in names]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"chunked_loss": True}, "--router-aux-loss-coef and --chunked-loss: that loss has no load-balancing term"),
        (
            {"sequence_parallel": 2},
            "--router-aux-loss-coef and --sequence-parallel: that loss has no load-balancing term",
        ),
        ({"gradient_checkpointing": True, "checkpointing_reentrant": True}, "Leave --checkpointing-reentrant out."),
        ({"task": "seq_cls", "num_labels": 2}, "--router-aux-loss-coef"),
        ({"task": "embedding"}, "--router-aux-loss-coef"),
    ],
)
def test_what_would_leave_it_out_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe.check(SftConfig(model="x", dataset=["x"], router_aux_loss_coef=0.1, **options), 2)


def test_a_model_without_experts_is_refused(tiny: Path) -> None:
    with pytest.raises(
        ConfigError, match="transformers has no load-balancing loss for the experts of Qwen3ForCausalLM"
    ):
        check_named_parts(str(tiny), SftConfig(model=str(tiny), dataset=["x"], router_aux_loss_coef=0.1))
