"""Commands with a user's own model, row format, loss, metric, optimizer, callback and reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PLUGINS = str(Path(__file__).with_name("plugins_for_tests.py"))
OWN = f"--external_plugins {PLUGINS} --model-type scaled_qwen --row-format qa --loss smooth --metrics hits".split()
OWN += "--optimizer momentum --callbacks notes --learning-rate 0.05".split()


@pytest.fixture(scope="module")
def qa(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rows in a form that only the plugin knows."""
    file = tmp_path_factory.mktemp("qa") / "qa.jsonl"
    turns = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    file.write_text("".join(json.dumps({"q": q["content"], "a": a["content"].split()}) + "\n" for q, a in turns))
    return str(file)


@pytest.fixture(scope="module")
def own(qa: str) -> list[str]:
    return [*OWN, "--dataset", qa, "--val-dataset", qa, "--weight-decay", "0.1"]


@pytest.fixture(scope="module")
def runs(commands, sft, own):
    plugins = ["--external-plugins", PLUGINS]
    grpo = "rlhf --rlhf-type grpo --model tiny --dataset stdlib#10 --num-generations 2 --reward-funcs brevty".split()
    return commands(
        [
            ("one", sft(*own, "--stage", "0")),
            ("two", sft(*own, "--stage", "3", "--nproc", "2")),
            ("exported", ["export", "RUNS/two", "OUT", *plugins]),
            ("stranger", "infer RUNS/two --prompt one".split()),
            ("unknown", sft("--loss", "smoth", *plugins)),
            ("missing", sft("--loss", "smooth", "--nproc", "2")),
            ("evaluated", sft("--metrics", "hits", *plugins)),
            ("judged", [*grpo, *plugins]),
            ("empty", sft("--model-type", "forgetful_qwen", *plugins)),
            ("lacks", sft(*own, "--part-learning-rates", "vision=1e-5")),
            ("cut_off", sft("--loss", "cut_off", *plugins)),
            ("plain", sft("--val-split", "0.3")),
            ("mean", sft("--val-split", "0.3", "--model-type", "mean_qwen", *plugins, "--per-device-batch-size", "4")),
            ("mean of two", sft("--val-split", "0.3", "--model-type", "mean_qwen", *plugins, "--nproc", "2")),
        ]
    )


def test_everything_of_ones_own_gives_the_same_numbers_on_every_rank_and_stage(runs) -> None:
    one, two = runs["one"], runs["two"]
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-3)
    assert one.series("loss")[-1] < one.series("loss")[0] - 0.1
    assert 0 < one.series("eval_hits")[0] < 1
    assert two.series("eval_hits") == one.series("eval_hits")
    assert [file.read_text() for file in sorted(two.folder.glob("rank-*.txt"))] == ["5 True", "5 True"]


@pytest.mark.parametrize("name", ["mean", "mean of two"])
def test_a_loss_of_ones_own_that_is_the_mean_of_a_batch_counts_by_its_tokens(runs, name: str) -> None:
    mean, plain = runs[name], runs["plain"]
    assert (mean.code, plain.code) == (0, 0), mean.output + plain.output
    assert mean.series("loss") == pytest.approx(plain.series("loss"), abs=2e-5)
    assert mean.series("grad_norm") == pytest.approx(plain.series("grad_norm"), rel=1e-4)
    assert mean.series("eval_loss") == pytest.approx(plain.series("eval_loss"), abs=2e-5)
    assert len(plain.series("loss")) == 5


def test_a_model_of_ones_own_is_saved_and_exported(runs) -> None:
    import torch
    from safetensors import safe_open

    assert runs["exported"].code == 0, runs["exported"].output
    for folder in (runs["two"].folder / "model", runs["exported"].folder):
        (file,) = folder.glob("*.safetensors")
        with safe_open(file, "pt") as weights:
            assert not torch.equal(weights.get_tensor("scale"), torch.ones(2048))
    assert runs["two"].output.splitlines()[-1].endswith(f"--external-plugins {PLUGINS}")


@pytest.mark.parametrize(
    "name, said",
    [
        ("stranger", "is a ScaledQwen, which transformers does not know"),
        ("unknown", "Did you mean smooth"),
        ("missing", "there is no such loss"),
        ("evaluated", "--metrics needs rows to evaluate on"),
        ("judged", "Did you mean brevity"),
        ("lacks", "--part-learning-rates vision=...: this model has no such part, it has llm"),
        ("empty", "scale of ForgetfulQwen is not in"),
    ],
)
def test_what_cannot_be_is_refused_before_it_trains(runs, name: str, said: str) -> None:
    assert runs[name].code == 2
    assert said in runs[name].output
    said_by_us = [line for line in runs[name].output.splitlines() if not line.startswith("  ")]
    assert len(said_by_us) <= 4, runs[name].output


def test_a_loss_without_a_graph_is_named_with_its_line(runs) -> None:
    run = runs["cut_off"]
    line = 1 + Path(PLUGINS).read_text().splitlines().index('@shardproof.register_loss("cut_off")')
    assert run.code == 2
    assert f"--loss cut_off (plugins_for_tests.py:{line}) returned a number that has no gradient with" in run.output
    assert "without .item()" in run.output
    assert "element 0 of tensors" not in run.output


def test_a_loss_is_not_blamed_for_what_the_model_gives() -> None:
    """Where nothing of the model is trained, and where nothing is learnt (evaluation)."""
    import torch
    from transformers.modeling_outputs import CausalLMOutput

    from shardproof.train.plugin_calls import own_loss

    loss = own_loss("mean", lambda outputs, labels: outputs.logits.mean())
    cut = own_loss("cut", lambda outputs, labels: outputs.logits.detach().mean())
    frozen, trained = (CausalLMOutput(logits=torch.ones(2, requires_grad=trained)) for trained in (False, True))
    assert loss(frozen, None) == cut(frozen, None) == loss(trained, None) == 1
    with torch.no_grad():
        assert cut(trained, None) == 1


@pytest.mark.slow
def test_with_adapters_with_rewards_and_when_it_is_asked(commands, sft, own, runs, tiny: Path, rows: Path) -> None:
    grpo = f"rlhf --rlhf-type grpo --model {tiny} --dataset {rows} --external-plugins {PLUGINS} --nproc 2".split()
    grpo += "--max-steps 1 --num-generations 2 --max-completion-length 6 --output-dir OUT --optimizer momentum".split()
    ask = f"infer {runs['two'].folder} --prompt one --max-new-tokens 4 --external-plugins {PLUGINS}".split()
    done = commands(
        [
            ("lora", sft(*own, "--nproc", "2", "--tuner", "lora")),
            ("grpo", [*grpo, "--reward-funcs", "brevity", "length"]),
            ("asked", ask),
        ]
    )
    for run in done.values():
        assert run.code == 0, run.output
    first = json.loads((done["grpo"].folder / "completions.jsonl").read_text().splitlines()[0])
    assert first["rewards"]["brevity"] < 0 <= first["rewards"]["length"]


@pytest.mark.slow
def test_so_it_is_under_torchrun(own, tiny: Path, tmp_path: Path, runs) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardproof", "sft"]
    command += ["--model", str(tiny), *own]
    command += "--max-steps 5 --global-batch-size 8 --lr-scheduler constant --output-dir".split()
    done = subprocess.run(
        [*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(runs["one"].series("loss"), rel=1e-5)


RECURRENT = """
import shardproof
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RecurrentConfig(PreTrainedConfig):
    model_type = "recurrent"

    def __init__(self, vocab_size=8, width=16, **more):
        super().__init__(**more)
        self.vocab_size, self.width = vocab_size, width


@shardproof.register_model("mute")
class Mute(PreTrainedModel):
    config_class = RecurrentConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.body = nn.GRU(config.width, config.width, batch_first=True)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, labels=None, num_items_in_batch=1, **more):
        logits = self.head(self.body(self.embed(input_ids))[0])
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return CausalLMOutput(loss=loss / num_items_in_batch, logits=logits)


@shardproof.register_model("recurrent")
class Recurrent(Mute, GenerationMixin):
    pass


@shardproof.register_model("faulty")
class Faulty(Recurrent):
    def forward(self, input_ids, **more):
        return super().forward(input_ids) + self.config.nothing_of_that_name
"""


@pytest.fixture(scope="module")
def recurrent(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin, and a model in `model` that is no transformer: there are no layers with a cache."""
    import shutil

    from transformers import AutoTokenizer

    from shardproof.plugins import load

    folder = tmp_path_factory.mktemp("recurrent")
    (folder / "recurrent_plugin.py").write_text(RECURRENT)
    shutil.copytree(tiny, folder / "model", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tiny / "tokenizer_config.json", folder / "model")
    kind = load([str(folder / "recurrent_plugin.py")]).find("model", "recurrent")
    model = kind(kind.config_class(vocab_size=json.loads((tiny / "config.json").read_text())["vocab_size"]))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model.head.bias.data[tokenizer("a")["input_ids"][0]] = 100.0
    model.save_pretrained(folder / "model")
    return folder


def ask(folder: Path, model_type: str | None = None) -> str:
    from shardproof.plugins import load
    from shardproof.train.answers.chat import Chat
    from shardproof.train.answers.sampling import Sampling

    chat = Chat(folder / "model", plugins=load([str(folder / "recurrent_plugin.py")]), model_type=model_type)
    return chat.answer([{"role": "user", "content": "one"}], Sampling(max_new_tokens=4))


def test_a_model_that_is_no_transformer_is_asked(recurrent: Path) -> None:
    """Its config knows of no layers, whose cache transformers would make."""
    assert ask(recurrent) == "aaaa"


def test_what_a_model_lacks_for_writing_is_named(recurrent: Path) -> None:
    from shardproof.errors import ConfigError

    with pytest.raises(ConfigError, match=r"Mute cannot generate: it has no generate\(\). Derive it from"):
        ask(recurrent, "mute")
    with pytest.raises(ConfigError, match=r"Faulty cannot be asked .*nothing_of_that_name.*recurrent_plugin.py, line"):
        ask(recurrent, "faulty")


def test_a_run_is_asked_as_the_model_that_it_was_trained_as(recurrent: Path, tiny: Path, tmp_path: Path, capfd) -> None:
    """By --model-type; what its config says may be another model."""
    import shutil

    from shardproof.cli.main import main

    run = shutil.copytree(recurrent, tmp_path / "run")
    (run / "config.yaml").write_text("model_type: mute\n")
    ask, plugin = ["infer", str(run), "--prompt", "one"], ["--external-plugins", str(recurrent / "recurrent_plugin.py")]
    assert main([*ask, *plugin]) == 2
    assert "Mute cannot generate" in capfd.readouterr().err
    shutil.rmtree(run / "model")
    shutil.copytree(tiny, run / "model")  # whose kind transformers knows
    for command in (ask, ["export", str(run), str(tmp_path / "out")]):
        assert main(command) == 2
        assert "--model-type mute: there is no such model" in capfd.readouterr().err


def test_an_answer_without_text_is_explained(recurrent: Path, tmp_path: Path, capfd) -> None:
    """It may be the end at once, as of a model that has learned little."""
    import shutil

    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    from shardproof.cli.main import main

    folder = shutil.copytree(recurrent / "model", tmp_path / "model")
    weights, end = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder).eos_token
    weights["head.bias"][AutoTokenizer.from_pretrained(folder).eos_token_id] = 1000.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plugins = ["--external-plugins", str(recurrent / "recurrent_plugin.py")]
    for stream in ("yes", "no"):
        assert (
            main(["infer", str(folder), "--prompt", "one", "--max-new-tokens", "2", "--stream", stream, *plugins]) == 0
        )
        said = capfd.readouterr()
        assert said.out.strip() == ""
        assert f"(an answer without text: the model wrote {end}" in said.err


@pytest.mark.slow
def test_a_model_that_is_no_transformer_trains_and_talks(commands, sft, recurrent: Path) -> None:
    plugins = ["--external-plugins", str(recurrent / "recurrent_plugin.py")]
    done = commands(
        [
            ("one", sft("--model", str(recurrent / "model"), *plugins, "--stage", "0")),
            ("two", sft("--model", str(recurrent / "model"), *plugins, "--stage", "3", "--nproc", "2")),
            ("asked", ["infer", "RUNS/two", "--prompt", "one", "--max-new-tokens", "4", *plugins]),
            (
                "asked by two",
                ["infer", "RUNS/two", "--prompt", "one", "--max-new-tokens", "4", *plugins, "--nproc", "2"],
            ),
        ]
    )
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    assert done["two"].series("loss") == pytest.approx(done["one"].series("loss"), rel=1e-6)
    assert done["asked"].output.strip() == done["asked by two"].output.strip() != ""


def test_a_plugin_that_wants_to_end_the_process_has_failed() -> None:
    from shardproof.errors import ConfigError
    from shardproof.train.plugin_calls import own_metric

    def leave(outputs, labels):
        raise SystemExit(0)

    with pytest.raises(ConfigError, match=r"--metrics gone \(test_plugins.py:\d+\) failed with SystemExit: 0"):
        own_metric("gone", leave)(None, None)


FAILING = """import shardproof

@shardproof.register_metric("boom")
def boom(outputs, labels):
    return {}["nope"]

@shardproof.register_metric("vector")
def vector(outputs, labels):
    return outputs.logits

@shardproof.register_loss("void")
def void(outputs, labels, num_items_in_batch=None):
    outputs.logits.sum()
"""


def test_what_fails_in_a_plugin_is_named_and_what_was_trained_is_there(commands, sft, rows, tmp_path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    own = ["--external-plugins", str(tmp_path / "failing.py"), "--max-steps", "2", "--val-dataset", str(rows)]
    done = commands(
        [
            ("boom", sft(*own, "--metrics", "boom", "--nproc", "2")),
            ("vector", sft(*own, "--metrics", "vector")),
            ("void", sft(*own, "--loss", "void")),
        ]
    )
    told = {
        "boom": "--metrics boom (failing.py:3) failed with KeyError: 'nope' (failing.py, line 5).",
        "vector": "--metrics vector (failing.py:7) returned a tensor of shape ",
        "void": "--loss void (failing.py:11) returned None. It must return a tensor with one number.",
    }
    for name, said in told.items():
        assert done[name].code != 0
        assert said in done[name].output
        model = done[name].folder / "model"
        assert model.exists() == (name != "void"), "the weights are saved before they are evaluated"
        assert (f"weights: {model}" in done[name].output) == (name != "void")
