"""Adapters of every kind that --tuner names: the numbers of one process, resumed, merged, asked and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.integrations.prepared import hold_as_computed, shard_prepared
from shardproof.models.loading.whole_files import OF_ADAPTERS
from shardproof.train.adapters.adding import check_named_parts, with_adapters
from shardproof.train.adapters.kinds import arguments_of, check_steps, of_kind
from shardproof.train.checks.contradictions import check_together
from shardproof.train.model.loading import load_model
from shardproof.train.model.parts import in_bits
from shardproof.train.options.config import SftConfig
from shardproof.train.options.tuners import KINDS
from shardproof.train.settings import mixed_precision

AGAIN = ["--gradient-checkpointing"]
REENTRANT = [*AGAIN, "--checkpointing-reentrant"]
# As small as the layers of a tiny model want them.
ARGUMENTS = {
    "adamss": ["r=4", "num_subspaces=2"],
    "c3a": ["block_size=8"],
    "fourierft": ["n_frequency=40"],
    "gralora": ["r=4"],
    "hira": ["r=4"],
    "miss": ["r=4"],
    "oft": ["oft_block_size=8"],
    "peanut": ["r=4"],
    "psoft": ["r=4"],
    "randlora": ["r=4"],
    "road": ["group_size=8"],
    "shira": ["r=4"],
    "tinylora": ["u=4"],
    "unilora": ["theta_d_length=16"],
    "vblora": ["num_vectors=8", "vector_length=8"],
    "vera": ["r=4"],
    "waveft": ["n_frequency=40"],
}
RATES = {"osf": "1e-3"}


def adapted(sft, kind: str, *more: str) -> list[str]:
    own = ["--tuner-arguments", *ARGUMENTS[kind]] if kind in ARGUMENTS else []
    rate = ["--learning-rate", RATES[kind]] if kind in RATES else []
    return sft("--tuner", kind, *own, *rate, *more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_one_process_from_the_first_step_to_the_merged_model(commands, sft, kind) -> None:
    two, save = ["--nproc", "2"], ["--save-steps", "2", "--max-steps", "4"]
    jobs = {
        "one": adapted(sft, kind, "--max-steps", "4"),
        "stage2": adapted(
            sft, kind, *two, "--stage", "2", *REENTRANT, "--per-device-batch-size", "2", "--max-steps", "4"
        ),
        "stage3": adapted(sft, kind, *two, "--stage", "3", *AGAIN, *save),
    }
    done = commands(list(jobs.items()))
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    one, last = done["one"], done["stage3"]
    assert one.series("loss")[-1] < one.series("loss")[0]
    for name, run in done.items():
        for key in ("loss", "grad_norm"):
            assert run.series(key) == pytest.approx(one.series(key), rel=2e-4), f"{key}: {name}"
    ask = ["--prompt", "the process", "--max-new-tokens", "4", "--temperature", "0"]
    later = commands(
        [
            ("again", [*jobs["stage3"], "--resume", str(last.folder / "checkpoint-2")]),
            ("merged", ["export", str(last.folder), "OUT"]),
            ("checkpoint", ["export", str(last.folder / "checkpoint-4"), "OUT"]),
            ("asked", ["infer", str(last.folder), *ask, "--nproc", "2"]),
            ("asked merged", ["infer", "RUNS/merged", *ask]),
            ("on", sft(*two, "--adapters", str(last.folder), "--max-steps", "1")),
        ]
    )
    for name, run in later.items():
        if kind == "beft" and ("merged" in name or name == "checkpoint"):
            assert "Base layer has no bias" in run.output or name == "asked merged"
            continue
        assert run.code == 0, f"{name}:\n{run.output}"
    assert later["again"].series("loss") == last.series("loss")[2:]
    assert later["on"].series("loss")[0] < one.series("loss")[0]
    if kind == "beft":  # it learns biases, which these layers do not have
        return
    merged, early = (load_file(later[name].folder / "model.safetensors") for name in ("merged", "checkpoint"))
    for name, value in merged.items():
        torch.testing.assert_close(value, early[name], rtol=1e-5, atol=1e-6)
    said = [later[name].output.splitlines()[-1] for name in ("asked", "asked merged")]
    assert said[0] == said[1]


@pytest.mark.slow
def test_ranks_that_a_run_has_chosen_are_trained_on(commands, sft) -> None:
    """On one process and on two, and after a stop; some layers have none."""
    few = ["--tuner-arguments", "init_r=3", "target_r=1", "tfinal=2", "deltaT=1"]
    (begun,) = commands([("begun", sft("--tuner", "adalora", *few, "--learning-rate", "3e-2"))]).values()
    on = ["--adapters", str(begun.folder), "--max-steps", "3"]
    done = commands(
        [
            ("on", sft(*on)),
            ("two", sft(*on, "--nproc", "2", "--stage", "3", "--save-steps", "1")),
            ("again", sft(*on, "--resume", "RUNS/two/checkpoint-1")),
            ("merged", ["export", "RUNS/two", "OUT"]),
            ("checkpoint", ["export", "RUNS/two/checkpoint-3", "OUT"]),
        ]
    )
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    alone, two = done["on"], done["two"]
    for key in ("loss", "grad_norm"):
        assert two.series(key) == pytest.approx(alone.series(key), rel=2e-4)
        assert done["again"].series(key) == pytest.approx(two.series(key)[1:], rel=2e-4)
    assert alone.series("loss")[0] < begun.series("loss")[0]
    said = [json.loads((run.folder / "model" / "adapter_config.json").read_text()) for run in (begun, alone, two)]
    kept = [sum(ranks) for ranks in said[0]["rank_pattern"].values()]
    assert min(kept) == 0 < max(kept)
    assert said[0]["rank_pattern"] == said[1]["rank_pattern"] == said[2]["rank_pattern"]
    sizes = [{n: v.shape for n, v in load_file(run.folder / "model" / OF_ADAPTERS[0]).items()} for run in (begun, two)]
    assert sizes[0] == sizes[1]
    merged, early = (load_file(done[name].folder / "model.safetensors") for name in ("merged", "checkpoint"))
    for name, value in merged.items():
        torch.testing.assert_close(value, early[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rlhf_trains_chosen_ranks_on_and_compares_with_what_they_were(commands, sft, tmp_path) -> None:
    few = ["--tuner-arguments", "init_r=3", "target_r=1", "tfinal=2", "deltaT=1"]
    (begun,) = commands([("begun", sft("--tuner", "adalora", *few, "--learning-rate", "3e-2"))]).values()
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"the {word}", "chosen": "a process", "rejected": "if it is"} for word in "abcdefghijklmnop"]
    rows.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))

    def rlhf(kind: str, *more: str) -> list[str]:
        on = ["--rlhf-type", kind, "--adapters", str(begun.folder), "--max-steps", "3", "--dataset", str(rows)]
        return ["rlhf", *sft(*on, *more)[1:]]

    rewards = ["--beta", "0.1", "--reward-funcs", "length", "--max-completion-length", "8"]
    done = commands(
        [
            ("on", rlhf("dpo")),
            ("two", rlhf("dpo", "--nproc", "2", "--stage", "3", "--save-steps", "1")),
            ("again", rlhf("dpo", "--resume", "RUNS/two/checkpoint-1")),
            ("base", rlhf("dpo", "--ref-adapters", "none", "--max-steps", "1")),
            ("once", rlhf("dpo", "--precompute-ref")),
            ("checkpoint", ["export", "RUNS/two/checkpoint-3", "OUT"]),
            ("grpo", rlhf("grpo", *rewards, "--nproc", "2", "--stage", "3")),
        ]
    )
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    alone, margins = done["on"], "rewards/margins"
    for key in ("loss", "grad_norm", margins):
        assert done["two"].series(key) == pytest.approx(alone.series(key), rel=2e-4, abs=1e-6)
        assert done["again"].series(key) == pytest.approx(done["two"].series(key)[1:], rel=2e-4, abs=1e-6)
    assert done["once"].series("loss") == pytest.approx(alone.series("loss"), rel=1e-5)
    for run, key in ((alone, margins), (done["grpo"], "kl")):
        assert run.series(key)[0] == pytest.approx(0, abs=1e-6), "the reference is what they were"
        assert abs(run.series(key)[-1]) > 1e-6, "and stays so"
    assert abs(done["base"].series(margins)[0]) > 1e-4, "the model without them is another one"


def computed_in_half(tiny: Path, kind: str, quantize: str | None) -> tuple[float, list[bool]]:
    """The loss of a few tokens in bf16, and which of what is trained has a gradient."""
    own = dict(text.split("=") for text in ARGUMENTS.get(kind, []))
    config = SftConfig(
        model=str(tiny), dataset=["x"], tuner=kind, tuner_arguments=own, precision="bf16", quantize=quantize
    )
    precision = mixed_precision("bf16")
    model = with_adapters(in_bits(load_model(str(tiny), config, to_shard=True), config), config).train()
    hold_as_computed(model, precision)
    model = shard_prepared(model, 3, precision, None)
    ids = torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), [p.grad is not None for p in model.parameters() if p.requires_grad]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, what in KINDS.items() if what.half])
def test_in_half_precision_buffers_meet_what_is_gathered(tiny: Path, kind: str) -> None:
    loss, have = computed_in_half(tiny, kind, None)
    assert all(have)
    assert 0 < loss < 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, what in KINDS.items() if what.four_bits])
def test_on_a_base_in_four_bits_go_those_that_work_on_what_passes_through(bitsandbytes, tiny: Path, kind: str) -> None:
    loss, have = computed_in_half(tiny, kind, "nf4")
    assert all(have)
    assert 0 < loss < 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tuner": "boft", "lora_rank": 4}, "--lora-rank needs --tuner lora. --tuner boft takes"),
        ({"tuner": "lora", "tuner_arguments": {"r": "4"}}, "--tuner-arguments does not apply to --tuner lora"),
        ({"tuner": "full", "tuner_arguments": {"r": "4"}}, "--tuner-arguments applies to adapters"),
        ({"tuner": "hra", "quantize": "nf4"}, "it computes with the weights themselves, which are packed"),
        ({"tuner": "adamss", "precision": "bf16"}, "PEFT computes it only in fp32"),
    ],
)
def test_what_is_of_other_adapters_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_together(SftConfig(model="x", dataset=["x"], **options))


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("boft", {"boft_blok_size": "4"}, "no such argument. Did you mean boft_block_size?\nIt takes boft_block_size"),
        ("boft", {"target_modules": "q_proj"}, "It has its own option: --target-modules"),
        ("boft", {"boft_block_size": "many"}, "PEFT expects int there, such as 4"),
        ("adalora", {"total_step": "4"}, "--tuner adalora has no such argument"),
    ],
)
def test_an_argument_that_peft_does_not_take_is_refused(kind, given, said) -> None:
    with pytest.raises(ConfigError) as error:
        arguments_of(kind, given)
    assert said in str(error.value)


def test_arguments_have_the_types_of_peft() -> None:
    found = arguments_of("loha", {"r": "4", "rank_dropout": "0.1", "layers_to_transform": "0,1", "init_weights": "no"})
    assert found == {"r": 4, "rank_dropout": 0.1, "layers_to_transform": [0, 1], "init_weights": False}
    assert arguments_of("loha", {"rank_pattern": '{"q_proj": 2}'}) == {"rank_pattern": {"q_proj": 2}}
    assert arguments_of("loha", {"exclude_modules": "down_proj"}) == {"exclude_modules": ["down_proj"]}
    assert arguments_of("loha", {"exclude_modules": ".*down_proj"}) == {"exclude_modules": ".*down_proj"}


def test_modules_of_ia3_that_take_what_goes_in_are_named_as_targets_are() -> None:
    config = SftConfig(model="x", dataset=["x"], tuner="ia3", tuner_arguments={"feedforward_modules": "down_proj"})
    assert of_kind(config, None, ["self_attn.q_proj", "mlp.down_proj"]).feedforward_modules == {"mlp.down_proj"}


@pytest.mark.parametrize(
    ("kind", "said"), [("reft", "PEFT has no ReFT"), ("prompt_tuning", "cannot be merged into the weights")]
)
def test_what_is_left_out_is_told_why(kind, said) -> None:
    with pytest.raises(ValueError, match=said):
        SftConfig(model="x", dataset=["x"], tuner=kind)


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [({}, 1, ": 1 step"), ({"tinit": "5"}, 5, ": 5 step"), ({"init_r": "4"}, 9, "init_r must be above target_r")],
)
def test_ranks_that_cannot_move_in_a_run_are_refused(given, steps, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_steps(SftConfig(model="x", dataset=["x"], tuner="adalora", tuner_arguments=given), steps)


def test_what_peft_fails_on_is_told_by_the_option(tiny: Path) -> None:
    config = SftConfig(model=str(tiny), dataset=["x"], tuner="randlora", tuner_arguments={"r": "0"})
    with pytest.raises(ConfigError, match="--tuner randlora --tuner-arguments r=0: PEFT refuses it: division by zero"):
        check_named_parts(str(tiny), config)
