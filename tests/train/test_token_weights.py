"""Promise: with weights the loss is the sum of weighed losses over the number of learnt tokens, the same at any stage
and number of processes, packed or not, with whole logits or without, of rows with files, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.weights import WEIGHTS
from shardproof.errors import ConfigError
from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.shortcuts import Weighed, check_weighed_loss
from shardproof.train.losses.tokens import weighed_loss
from shardproof.train.options.config import SftConfig
from shardproof.train.options.places import from_anywhere
from shardproof.train.run import recipe_of
from train.token_losses import assert_same, drawn

FEW = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --learning-rate 3e-3"


def by_hand(hidden: Any, head: Any, labels: Any, weights: Any, dft: bool, smoothing: float) -> torch.Tensor:
    odds, total = (hidden @ head.T).log_softmax(-1), torch.zeros((), dtype=hidden.dtype)
    for row in range(len(labels)):
        for at, token in enumerate(labels[row].tolist()):
            if at and token != -100:
                here = odds[row, at - 1]
                loss = -(1 - smoothing) * here[token] - smoothing * here.mean()
                total = total + weights[row, at] * loss * (here[token].detach().exp() if dft else 1.0)
    return total / 7


@pytest.mark.parametrize(("dft", "smoothing"), [(False, 0.0), (True, 0.0), (False, 0.2)])
@pytest.mark.parametrize("how", ["whole", "chunked", "parts"])
def test_loss_and_gradients_are_those_of_the_formula(how: str, dft: bool, smoothing: float) -> None:
    hidden, head, labels = drawn()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) * 3
    wanted = by_hand(hidden, head, labels, weights, dft, smoothing)
    expected = torch.autograd.grad(wanted, (hidden, head))
    if how == "chunked":
        learnt = labels[:, 1:].ne(-100)
        given = hidden[:, :-1][learnt], head, None, labels[:, 1:][learnt], 7, dft, smoothing
        loss = chunked_cross_entropy(*given, shares=weights[:, 1:][learnt])
    else:
        inputs = {"labels": labels, WEIGHTS: weights}
        if how == "parts":
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            inputs = {"shift_labels": shifted, WEIGHTS: torch.nn.functional.pad(weights, (0, 1), value=-100.0)[:, 1:]}
        loss = weighed_loss({"logits": hidden @ head.T}, inputs, 7, dft, smoothing)
    assert_same(loss, wanted, (hidden, head), expected)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """Of the rows each second calls a tool, and each third has a weight."""
    file = tmp_path_factory.mktemp("calls") / "calls.jsonl"
    with file.open("w") as out:
        for number, line in enumerate(rows.read_text().splitlines()):
            row = json.loads(line)
            answer = row["messages"][-1]
            if number % 2:
                answer["content"] = f"<tool_call>{answer['content'][:40]}</tool_call> {answer['content'][:9]}"
            if number % 3 == 0:
                answer["weight"] = 0.25
            out.write(json.dumps(row) + "\n")
    return file


TWO = "--nproc 2 --stage 3"
PACKED = "--packing --max-length 96"
WAYS = {
    "one": "--stage 0",
    "two": f"{TWO} --chunked-loss --gradient-checkpointing",
    "packed one": f"--stage 0 {PACKED}",
    "packed two": f"{TWO} {PACKED} --attn varlen",
}
MORE = {
    "parts": f"{TWO} --sequence-parallel 2",
    "free": "--nproc 2 --stage 2 --padding-free --per-device-batch-size 2",
    "pairs": "--nproc 2 --stage 1 --per-device-batch-size 2 --deterministic",
    "packed parts": f"{TWO} {PACKED} --sequence-parallel 2 --chunked-loss",
    "streamed one": "--stage 0 --streaming --shuffle-buffer-size 0",
    "streamed two": f"{TWO} --streaming --shuffle-buffer-size 0",
    "dft one": "--stage 0 --loss-type dft",
    "dft two": f"{TWO} --loss-type dft --chunked-loss",
}


def train(commands, tiny: Path, file: Path, ways: dict[str, str]) -> Any:
    fixed = ["sft", "--model", str(tiny), "--dataset", str(file), "--val-dataset", str(file), "--output-dir", "OUT"]
    fixed += [*FEW.split(), "--token-weights", "hermes"]
    return commands([(name, [*fixed, *more.split()]) for name, more in ways.items()])


def check_same(one, two) -> None:
    assert one.code == two.code == 0, one.output + two.output
    assert len(one.series("loss")) == 3
    assert len(one.series("eval_loss")) == 1
    for name in ("loss", "eval_loss"):
        assert two.series(name) == pytest.approx(one.series(name), abs=2e-5), name
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=2e-4)


@pytest.fixture(scope="module")
def runs(commands, tiny: Path, calls: Path):
    plain = {"plain": "--stage 0 --token-weights ignore_think_prefix"}
    return train(commands, tiny, calls, {**WAYS, **plain})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "packed "])
def test_losses_are_those_of_one_process(runs, how: str) -> None:
    check_same(runs[f"{how}one"], runs[f"{how}two"])


@pytest.mark.slow
def test_calls_weigh_more(runs) -> None:
    """Of a new model all tokens are alike, so that the loss says how much they weigh."""
    assert runs["one"].series("loss")[0] > 1.2 * runs["plain"].series("loss")[0]


@pytest.mark.slow
def test_so_they_are_in_every_other_way(commands, tiny: Path, calls: Path, runs) -> None:
    found = train(commands, tiny, calls, MORE)
    for name in ("parts", "free", "pairs"):
        check_same(runs["one"], found[name])
    check_same(runs["packed one"], found["packed parts"])
    for name in ("streamed", "dft"):
        check_same(found[f"{name} one"], found[f"{name} two"])


@pytest.mark.slow
def test_so_they_are_of_rows_with_files(commands, tiny_models, files: Path) -> None:
    asked = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "well <tool_call>look</tool_call> no"}
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": asked}, answer]} for _ in range(3)]
    rows += [{"messages": [{"role": "user", "content": "who?"}, {**answer, "content": "me " * n}]} for n in range(2, 7)]
    rows[0]["messages"][1] = {**answer, "weight": 4}
    file = files / "weighed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ways = {
        "one": f"--stage 0 --workers 0 --row-cache {files}/weighed",
        "two": f"{TWO} --workers 0 --row-cache {files}/weighed",
        "packed one": f"--stage 0 --workers 0 {PACKED.replace('96', '300')}",
        "packed two": f"{TWO} --workers 0 {PACKED.replace('96', '300')}",
    }
    found = train(commands, tiny_models("qwen2_5_omni"), file, ways)
    check_same(found["one"], found["two"])
    check_same(found["packed one"], found["packed two"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss": "mine"}, "--token-weights and --loss mine: that loss gives all tokens the same weight"),
        ({"train_parts": ["talker"]}, "--token-weights and --train-parts talker"),
        ({"task": "seq_cls", "num_labels": 2}, "--token-weights"),
        ({"token_weights": ["hermess"]}, "Did you mean hermes?"),
    ],
)
def test_what_it_does_not_go_together_with(options: dict[str, Any], why: str) -> None:
    config = SftConfig(**{"model": "m", "dataset": ["d"], "token_weights": ["hermes"], **options})
    with pytest.raises(ConfigError) as error:
        recipe_of(config).check(config, 1)
    assert why in str(error.value)


def test_a_model_whose_loss_has_another_term_is_refused(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    inputs = {"input_ids": torch.arange(1, 30)[None], "labels": torch.arange(1, 30)[None]}
    check_weighed_loss(model, inputs)
    forward = model.forward

    def with_a_term(*args: Any, **given: Any) -> Any:
        outputs = forward(*args, **given)
        outputs.loss = None if outputs.loss is None else outputs.loss + 1.0
        return outputs

    model.forward = with_a_term
    with pytest.raises(ConfigError, match="is not the mean cross entropy of its tokens"):
        check_weighed_loss(model, inputs)
    assert not Weighed(False).may_be
    with pytest.raises(ConfigError, match="is not the mean cross entropy of its tokens"):
        Weighed(True)(model, inputs)
    of_stream = Weighed(None)
    of_stream(model, inputs)
    with pytest.raises(ConfigError, match="is not the mean cross entropy of its tokens"):
        of_stream.have_come()


ONE_MORE = """
import shardproof
from transformers import Qwen3ForCausalLM


@shardproof.register_model("one_more")
class OneMore(Qwen3ForCausalLM):
    def forward(self, *args, **given):
        outputs = super().forward(*args, **given)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + outputs.logits.pow(2).mean() + 1
        return outputs
"""


@pytest.mark.slow
def test_so_it_is_where_the_rows_of_a_stream_have_weights(commands, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """That they have some is known when they come; without, the loss of the model may be any."""
    (tmp_path / "plugin.py").write_text(ONE_MORE)
    plain = [json.loads(line) for line in rows.read_text().splitlines()][:12]
    plain[9]["messages"][-1]["weight"] = 0.5
    jobs = []
    for name, some in (("weighed", plain), ("plain", plain[:9])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        argv = ["sft", "--model", str(tiny), "--model-type", "one_more", "--external-plugins", f"{tmp_path}/plugin.py"]
        argv += ["--dataset", f"{tmp_path}/{name}.jsonl", "--streaming", "--shuffle-buffer-size", "0", *FEW.split()]
        jobs.append((name, [*argv, "--output-dir", "OUT"]))
    found = commands(jobs)
    assert found["plain"].code == 0, found["plain"].output
    assert found["weighed"].code != 0
    assert "the loss of OneMore is not the mean cross entropy of its tokens" in found["weighed"].output


def test_a_run_records_where_a_file_of_weights_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text('{"a": 2}')
    (tmp_path / "hermes").mkdir()  # is no set of weights
    monkeypatch.chdir(tmp_path)
    assert from_anywhere("token_weights", ["hermes", "mine.json"]) == ["hermes", str(tmp_path / "mine.json")]
    assert "token_weights" in SftConfig.sources
