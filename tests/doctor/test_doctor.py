"""Promise: `shardproof doctor` finds what would spoil a run before it begins, and says which option to change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

CUT = "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
TWICE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|><|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A model that its author has made train the last half of its layers only.
PLUGIN = """
import shardproof
from transformers import AutoModelForCausalLM


@shardproof.register_model("half_frozen")
def half_frozen(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return model


@shardproof.register_loss("lost")
def lost(outputs, labels, num_items_in_batch):
    raise ValueError("there are no weights of tokens")
"""


def damaged_tokenizer(tiny: Path, folder: Path) -> Path:
    """The tiny model with a tokenizer that has more tokens than the embedding has rows."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new-{i}>" for i in range(2000)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory, tiny, rows, commands) -> dict[str, tuple[int, dict[str, dict]]]:
    """For each planted fault the exit code, and the checks by name."""
    base = tmp_path_factory.mktemp("faults")
    pictured = base / "pictured.jsonl"
    turns = [{"role": "user", "content": "<image> what is this"}, {"role": "assistant", "content": "a shard"}]
    lines = rows.read_text().splitlines()[:8]
    pictured.write_text("\n".join([*lines, json.dumps({"messages": turns, "images": ["no/such.png"]})]) + "\n")
    bad = base / "bad.jsonl"
    bad.write_text("\n".join([*lines, '{"query": "no answer"}']) + "\n")
    plugin = base / "half.py"
    plugin.write_text(PLUGIN)
    large = damaged_tokenizer(tiny, base / "large")
    fixed = ["doctor", "--json", "--global-batch-size", "4", "--nproc", "2", "--stage", "3"]
    data = ["--dataset", str(rows), "--model", str(tiny)]
    planned = ["--trial", "no"]
    without = [*planned, "--plan", "no"]
    jobs = {
        "sound": [*fixed, *data, "--learning-rate", "1e-3"],
        "learning rate": [*fixed, *data, "--learning-rate", "0.3", "--plan", "no"],
        "template": [*fixed, *data, *without, "--chat-template", CUT],
        "twice": [*fixed, *data, *without, "--chat-template", TWICE],
        "adapters": [*fixed, *data, *without, "--tuner", "lora", "--target-modules", "no_such_proj"],
        "image": [*fixed, *without, "--model", str(tiny), "--dataset", str(pictured)],
        "vocabulary": [*fixed, *without, "--dataset", str(rows), "--model", str(large)],
        "frozen": [*fixed, *data, *without, "--external-plugins", str(plugin), "--model-type", "half_frozen"],
        "row": [*fixed, *without, "--model", str(tiny), "--dataset", str(bad)],
        "memory": [*fixed, *data, *planned, "--memory", "0.01"],
        "loss": [*fixed, *data, "--plan", "no", "--external-plugins", str(plugin), "--loss-type", "lost"],
    }
    done = commands(list(jobs.items()))
    results = {}
    for name, run in done.items():
        text = run.output[run.output.find("{") :] if "{" in run.output else "{}"
        try:
            checks = json.loads(text)["checks"]
        except (ValueError, KeyError):
            pytest.fail(f"{name}: {run.output}")
        results[name] = run.code, {f"{c['area']}: {c['name']}": c for c in checks}
    return results


def failures(checks: dict[str, dict]) -> list[str]:
    return [name for name, check in checks.items() if check["status"] == "fail"]


def test_a_sound_run_passes(found):
    code, checks = found["sound"]
    assert failures(checks) == []
    assert code == 0
    seen = {"environment: versions", "data: rows", "data: answers", "model: weights", "plan: memory", "trial: loss"}
    assert seen <= set(checks)
    assert "GB/s" in checks["trial: ranks"]["evidence"]


@pytest.mark.parametrize(
    ("fault", "check", "word"),
    [
        ("learning rate", "trial: loss", "--learning-rate"),
        ("template", "data: answers", "--chat-template"),
        ("twice", "data: repeated token", "--chat-template"),
        ("adapters", "model: adapters", "--target-modules"),
        ("image", "data: files", "--media-root"),
        ("vocabulary", "data: vocabulary", "tokenizer"),
        ("frozen", "model: trained", "requires_grad_"),
        ("row", "data: rows", "--bad-rows"),
        ("memory", "plan: memory", "--stage 3"),
        ("loss", "trial: steps", "explain"),
    ],
)
def test_a_planted_fault_is_found_and_the_option_named(found, fault, check, word):
    code, checks = found[fault]
    assert code == 1
    # A model of text cannot take a row with a picture at all, and says that as well.
    assert [f for f in failures(checks) if (fault, f) != ("image", "data: rows for the model")] == [check]
    assert checks[check]["cause"]
    assert checks[check]["evidence"]
    assert word in checks[check]["option"]


def test_what_the_trial_has_ended_with_is_told(found):
    """In the object, too, that `--json` prints."""
    assert "there are no weights of tokens" in found["loss"][1]["trial: steps"]["evidence"]


def test_a_full_disk_is_found(tmp_path):
    from shardproof.doctor.checks.machine import bytes_to_write, disk
    from shardproof.doctor.config import DoctorConfig

    config = DoctorConfig(output_dir=str(tmp_path / "runs" / "new"), save_steps=10, save_total_limit=2)
    needed = bytes_to_write(config, 1_000_000, 1_000_000, steps=100, epoch=100)
    assert needed == 4e6 + 3 * (4e6 + 8e6)
    (check,) = disk(config, needed, free=needed - 1)
    assert (check.status, str(tmp_path) in check.evidence) == ("fail", True)
    assert "--save-total-limit" in check.option
    assert disk(config, needed, free=10 * needed)[0].status == "ok"
    assert disk(config, 1 << 62)[0].status == "fail"  # of the real disk


def test_a_talker_on_another_device_is_found():
    import torch
    from torch import nn

    from shardproof.doctor.checks.model_checks import places

    class Elsewhere(nn.Parameter):
        """A parameter that says it is on a GPU: this machine need not have one."""

        device = torch.device("cuda", 0)
        is_meta = False

    model = nn.ModuleDict({"talker": nn.Linear(2, 2), "thinker": nn.Linear(4, 4)})
    model["thinker"].weight = Elsewhere(torch.ones(4, 4))
    model["thinker"].bias = Elsewhere(torch.ones(4))
    model["head"] = nn.Module()
    model["head"].weight = Elsewhere(torch.ones(4))
    devices = next(c for c in places(model) if c.name == "devices")
    assert devices.status == "warn"
    assert "talker.weight" in devices.evidence
    model["talker"].to("meta")
    assert places(model)[0].status == "fail"


def talking(part):
    """A model with a talker that is as `part` makes it."""
    import torch
    from torch import nn

    class Thinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thinker, self.talker = nn.Linear(4, 4), part(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            talker = self.talker[0] if isinstance(self.talker, list) else self.talker
            return talker(self.thinker(x))

    return Thinks()


def pinned_to(place):
    """What device_map leaves on a module, but for the weights, which it moves and the engine moves again."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class Stays(AlignDevicesHook):
        def init_hook(self, module):
            return module

    return lambda module: add_hook_to_module(module, Stays(execution_device=place))


@pytest.mark.parametrize(
    ("part", "device", "ranks", "status"),
    [
        (pinned_to("meta"), "cpu", 1, "fail"),  # "meta" stands for a second device, which this machine need not have
        (pinned_to("cpu"), "cpu", 2, "ok"),
        (pinned_to(0), "cuda:0", 1, "ok"),
        (pinned_to(0), "cuda:0", 2, "fail"),
        (lambda module: [module.to("meta")], "cpu", 1, "fail"),
        (lambda module: [module], "cpu", 1, "warn"),
    ],
    ids=["pinned elsewhere", "pinned here", "its GPU", "one GPU for two", "hidden elsewhere", "hidden here"],
)
def test_a_talker_that_stays_on_another_device_fails_as_the_run_would(part, device, ranks, status):
    import torch

    from shardproof.doctor.checks.model_checks import places

    model = talking(part)
    check = next(c for c in places(model, torch.device(device), ranks) if c.name == "devices")
    assert check.status == status
    if status == "fail":
        assert "talker" in check.evidence
        assert check.cause
        assert check.option
    if device == "cpu":  # this machine's: what the engine does with such a model
        import shardproof

        sharded = shardproof.shard(model, 3)
        if status == "fail":
            with pytest.raises((RuntimeError, NotImplementedError)):
                sharded(torch.ones(1, 4)).sum().item()
        else:
            assert sharded(torch.ones(1, 4)).isfinite().all()


def test_a_special_token_that_is_there_twice_is_found():
    from shardproof.doctor.checks.data_checks import special_tokens
    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["a few words"])
    assert special_tokens(tokenizer)[0].status == "ok"
    tokenizer.add_tokens([f" {tokenizer.eos_token}"], special_tokens=True)  # once more, with a space before it
    (check,) = special_tokens(tokenizer)
    assert check.status == "fail"
    assert "<|im_end|>' is 2 tokens" in check.evidence
