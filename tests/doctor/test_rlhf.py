"""Promise: `shardproof doctor` and `verify` look at runs of `shardproof rlhf` as at those of `sft`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor.test_doctor import CUT
from shardproof.cli import sft
from shardproof.cli.verify import RlhfVerifyConfig, taken_at_once
from shardproof.cli.watching import recipe_class
from shardproof.doctor.checks import rlhf_checks
from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from train.rlhf.conftest import files, models  # noqa: F401

CHANCE = f"{Path(__file__).parents[1] / 'train' / 'rlhf' / 'rewards_for_tests.py'}:chance"
GENERATED = ["--num-generations", "2", "--max-completion-length", "8", "--temperature", "4"]
FIXED = ["--global-batch-size", "4", "--per-device-batch-size", "2", "--nproc", "2", "--stage", "3"]


@pytest.fixture(scope="module")
def argv(models, files):  # noqa: F811
    """The options of a run of each kind."""
    rows = {
        **dict.fromkeys(("dpo", "orpo", "simpo", "cpo", "rm"), "pairs"),
        **dict.fromkeys(("grpo", "rloo", "ppo"), "prompts"),
        "kto": "judged",
        "gkd": "chats",
    }

    def of(kind: str) -> list[str]:
        more = [*GENERATED, "--reward-funcs", CHANCE] if rows[kind] == "prompts" else []
        more += ["--teacher-model", str(models["other"]), "--lmbda", "0"] if kind == "gkd" else []
        more += ["--beta", "0.1"] if kind == "grpo" else []
        model = ["--model", str(models["policy"])]
        return ["--rlhf-type", kind, *model, "--dataset", str(files[rows[kind]]), *FIXED, *more]

    return of


@pytest.fixture(scope="module")
def looked(argv, commands, files, tiny_models, tmp_path_factory):  # noqa: F811
    """Without steps."""
    one_kind = tmp_path_factory.mktemp("labels") / "good.jsonl"
    lines = files["judged"].read_text().splitlines()
    one_kind.write_text("\n".join(json.dumps({**json.loads(line), "label": True}) for line in lines))
    judged = [str(one_kind) if word == str(files["judged"]) else word for word in argv("kto")]
    bare = one_kind.with_name("bare.jsonl")
    bare.write_text('{"query": "2+2?"}\n' * 4)
    unanswered = ["accuracy" if word == CHANCE else word for word in argv("grpo")] + ["--val-dataset", str(bare)]
    without = ["--plan", "no", "--trial", "no"]
    seeing = str(tiny_models("qwen2_5_vl"))

    def sees(kind: str) -> list[str]:
        given = argv(kind)
        return [seeing if before == "--model" else word for before, word in zip(["", *given], given, strict=False)]

    return commands(
        [
            ("template", ["doctor", "--json", *argv("dpo"), *without, "--chat-template", CUT]),
            ("labels", ["doctor", "--json", *judged, *without]),
            ("unanswered", ["doctor", "--json", *unanswered, *without]),
            ("drawn", ["verify", *argv("grpo")]),
            ("rm", ["doctor", "--json", *argv("rm"), *without]),
            *((f"sees {kind}", ["doctor", "--json", *sees(kind), *without]) for kind in ("rm", "ppo", "dpo")),
        ]
    )


@pytest.fixture(scope="module")
def done(argv, commands, tmp_path_factory):
    """With steps on two ranks."""
    written = tmp_path_factory.mktemp("rlhf") / "run.yaml"
    pairs = dict(zip([w[2:] for w in argv("dpo")[::2]], argv("dpo")[1::2], strict=True))
    numbers = {key: value if not value.isdigit() else int(value) for key, value in pairs.items()}
    written.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in numbers.items()))
    return commands(
        [
            ("dpo", ["doctor", "--json", str(written), "--learning-rate", "1e-4"]),
            ("grpo", ["doctor", "--json", *argv("grpo"), "--learning-rate", "1e-4"]),
            ("verify", ["verify", *argv("dpo"), "--learning-rate", "1e-3", "--steps", "2"]),
        ]
    )


@pytest.mark.parametrize(("shares", "at_once"), [(1, 8), (2, 4), (4, 2)])
def test_one_process_takes_at_once_what_the_ranks_do(shares: int, at_once: int) -> None:
    """Processes that share a row take it once; kto was said to differ there."""
    options = {"model": "x", "dataset": ["x"], "nproc": 4, "per_device_batch_size": 2, "sequence_parallel": shares}
    config = RlhfVerifyConfig(rlhf_type="kto", **options)
    assert taken_at_once(config, config.batch(4)) == {"sequence_parallel": 1, "per_device_batch_size": at_once}
    pairs = RlhfVerifyConfig(rlhf_type="dpo", **options)
    assert taken_at_once(pairs, pairs.batch(4)) == {"sequence_parallel": 1}


def checks_of(run) -> dict[str, dict]:
    text = run.output[run.output.find("{") :]
    return {f"{c['area']}: {c['name']}": c for c in json.loads(text)["checks"]}


def failures(run) -> list[str]:
    return [name for name, check in checks_of(run).items() if check["status"] == "fail"]


@pytest.mark.slow
def test_a_sound_run_on_pairs_passes(done):
    """Its options stand in a file, which says by rlhf_type what they are for."""
    assert failures(done["dpo"]) == [], done["dpo"].output
    assert done["dpo"].code == 0
    seen = {"data: answers", "data: lengths", "model: weights", "plan: memory", "trial: loss", "trial: gradients"}
    assert seen <= set(checks_of(done["dpo"]))
    assert "not trained" in checks_of(done["dpo"])["plan: memory"]["evidence"]  # the reference


@pytest.mark.slow
def test_what_is_generated_is_rewarded_in_the_trial(done):
    checks = checks_of(done["grpo"])
    assert failures(done["grpo"]) == [], done["grpo"].output
    assert "spread" in checks["trial: rewards"]["evidence"]
    assert "other answers" in checks["trial: loss"]["evidence"]
    longest = int(checks["data: lengths"]["evidence"].split()[2])
    assert f"{longest + 8} tokens" in checks["plan: memory"]["evidence"]  # a prompt and its answer


def test_a_template_that_drops_answers_is_found(looked):
    assert failures(looked["template"]) == ["data: answers"]
    assert looked["template"].code == 1
    assert "--chat-template" in checks_of(looked["template"])["data: answers"]["option"]


def test_judged_answers_of_one_kind_are_told(looked):
    assert checks_of(looked["labels"])["data: labels"]["status"] == "warn"


def test_rows_to_evaluate_on_have_what_rewards_want(looked):
    assert failures(looked["unanswered"]) == ["data: rows to evaluate on"]
    assert (
        "accuracy compares answers with the right one"
        in checks_of(looked["unanswered"])["data: rows to evaluate on"]["evidence"]
    )


def test_the_head_for_words_of_a_reward_model_is_not_missed(looked):
    assert checks_of(looked["rm"])["model: weights"]["status"] == "ok"


@pytest.mark.parametrize("kind", ["dpo", "rm", "ppo"])
def test_a_model_that_sees_is_sound(looked, kind):
    assert failures(looked[f"sees {kind}"]) == []


@pytest.mark.slow
def test_verify_compares_a_run_on_pairs(done):
    assert done["verify"].code == 0, done["verify"].output
    assert "equal to 0.0001 of the largest value" in done["verify"].output
    assert " 0 parameters" not in done["verify"].output


@pytest.mark.parametrize(("options", "drawn"), [({}, False), ({"lmbda": 0.5}, True), ({"seq_kd": True}, True)])
def test_answers_of_gkd_are_drawn_by_student_or_teacher(options, drawn):
    config = RlhfConfig(rlhf_type="gkd", dataset=["x"], **{"lmbda": 0.0, **options})
    assert rlhf_checks.draws_answers(config) is drawn


def test_verify_refuses_answers_that_are_drawn(looked):
    assert looked["drawn"].code == 2
    assert "that each rank samples" in looked["drawn"].output


OTHERS = ("kto", "orpo", "simpo", "cpo", "rm", "gkd")


@pytest.mark.slow
def test_every_other_kind(argv, commands):
    """And a learning rate that is far too large."""
    rate = ["--learning-rate", "1e-4"]
    looks = [(f"doctor {kind}", ["doctor", "--json", *argv(kind), *rate]) for kind in (*OTHERS, "rloo", "ppo")]
    compared = [(f"verify {kind}", ["verify", *argv(kind), *rate, "--steps", "2"]) for kind in OTHERS]
    large = ("large", ["doctor", "--json", *argv("orpo"), "--learning-rate", "1", "--plan", "no"])
    done = commands([*looks, *compared, large])
    for name, _ in looks:
        assert failures(done[name]) == [], done[name].output
    for name, _ in compared:
        assert done[name].code == 0, done[name].output
        assert "equal to" in done[name].output
    assert failures(done["large"]) == ["trial: loss"]


def test_a_run_of_rlhf_is_known_by_its_file_wherever_that_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "run.conf", "old/config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("model: m\ndataset: d\nrlhf_type: dpo\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def kind(*words: str) -> type:
        return recipe_class(words, DoctorConfig, RlhfDoctorConfig)

    for words in (["run.yaml"], ["--stage", "2", "run.yaml"], ["run.conf", "--stage", "2"], ["--config=run.conf"]):
        assert kind(*words) is RlhfDoctorConfig, words
    assert kind("--resume", "old") is kind("--resume", "auto", "--output-dir", "old") is RlhfDoctorConfig
    assert kind("--resume", "old", "--model", "m") is kind("rows.jsonl") is kind("none.yaml") is DoctorConfig
    with pytest.raises(ConfigError, match=r"run.yaml:3: rlhf_type is an option of 'shardproof rlhf'"):
        sft.parse(["run.yaml"])
