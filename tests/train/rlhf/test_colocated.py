"""A vLLM in each process that trains: it has the weights of the step, at every stage, and the numbers are those of one
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.vllm import check_fits, room_of
from train.conftest import last_of_each
from train.rlhf.algorithms import prepared_for
from train.rlhf.vllm_of_transformers import found, given_to_vllm

pytestmark = pytest.mark.slow

OWN = Path(__file__).with_name("rewards_for_tests.py")
TOOLS = Path(__file__).with_name("tools_for_tests.py")
ASKED = "--use-vllm --vllm-mode colocate".split()


@pytest.fixture(autouse=True)
def _vllm_is_installed() -> Any:
    with found():
        yield


def command(models: dict[str, Path], files: dict[str, Path], kind: str, *more: str) -> list[str]:
    argv = ["--rlhf-type", kind, "--model", str(models["policy"]), "--dataset", str(files["prompts"])]
    argv += "--max-steps 3 --learning-rate 1e-2 --num-generations 4 --global-batch-size 8 --logging-steps 1".split()
    argv += ["--max-completion-length", "6", "--reward-funcs", f"{OWN}:chance", *ASKED, *more]
    return last_of_each(argv)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_one_process(
    pools: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    argv = command(models, files, kind)
    variants: list[dict[str, Any]] = [
        {"stage": 3, "per_device_batch_size": 4},
        {"stage": 2, "per_device_batch_size": 4, "tuner": "lora", "vllm_sleep": True},
        {"stage": 3, "per_device_batch_size": 8, "sequence_parallel": 2},
    ]
    alone = [{**variant, "stage": 0, "per_device_batch_size": 8, "sequence_parallel": 1} for variant in variants]
    one, _, _ = pools.run(1, given_to_vllm, prepared_for(argv, 1, alone, tmp_path / "one"), timeout=300.0)[0]
    two, loads, given = pools.run(2, given_to_vllm, prepared_for(argv, 2, variants, tmp_path / "two"), timeout=300.0)[0]
    for mine, wanted, times in zip(two, one, loads, strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy"):
            assert [r[name] for r in mine] == pytest.approx([r[name] for r in wanted], abs=2e-4, rel=1e-4), name
        assert [r["answers"] for r in mine] == [pytest.approx(r["answers"]) for r in wanted]
        assert any(r["grad_norm"] > 1e-3 for r in mine)
        assert times >= 3 * 20  # weights of each step
    if kind == "grpo":  # what vLLM says of its answers is what the model says of them: it has its weights
        ratios = [r["sampling/importance_sampling_ratio/mean"] for mine in two for r in mine]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)
    assert given[0]["gpu_memory_utilization"] == 0.3


@pytest.mark.slow
def test_so_are_those_of_a_student_whose_answers_it_writes(
    pools: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    """And where it takes the likeliest token, always, those of a student that writes them itself."""
    argv = ["--rlhf-type", "gkd", "--model", str(models["policy"]), "--teacher-model", str(models["other"])]
    argv += ["--dataset", str(files["chats"]), "--max-completion-length", "6", *ASKED]
    argv += "--max-steps 4 --learning-rate 1e-2 --global-batch-size 8 --logging-steps 1 --temperature 1e-4".split()
    ways: list[dict[str, Any]] = [
        {"lmbda": 0.5, "sft_alpha": 0.1},
        {"lmbda": 1.0, "tuner": "lora"},
        {"lmbda": 1.0, "vllm_sleep": True, "use_vllm": True},
    ]
    alone = [{**way, "stage": 0, "per_device_batch_size": 8} for way in ways]
    alone += [{**alone[2], "use_vllm": False, "vllm_mode": "server", "vllm_sleep": False}]
    two = [{**way, "stage": 3, "per_device_batch_size": 4} for way in ways]
    one, loads, _ = pools.run(1, given_to_vllm, prepared_for(argv, 1, alone, tmp_path / "one"), timeout=300.0)[0]
    many, _, _ = pools.run(2, given_to_vllm, prepared_for(argv, 2, two, tmp_path / "two"), timeout=300.0)[0]
    for mine, wanted in zip([*many, one[2]], one, strict=True):
        for name in ("loss", "grad_norm"):
            assert [r[name] for r in mine] == pytest.approx([r[name] for r in wanted], abs=2e-4, rel=2e-3), name
    assert 0 < loads[0] < loads[2], "in some of the steps the answers are those of the rows"


@pytest.mark.slow
def test_ranks_that_share_a_vllm_ask_it_together(
    pools: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    argv = command(models, files, "grpo")
    one: dict[str, Any] = {"stage": 0, "per_device_batch_size": 8}
    two = {"stage": 3, "per_device_batch_size": 4, "vllm_tensor_parallel_size": 2}
    (wanted,), _, _ = pools.run(1, given_to_vllm, prepared_for(argv, 1, [one], tmp_path / "one"), timeout=300.0)[0]
    (mine,), _, given = pools.run(2, given_to_vllm, prepared_for(argv, 2, [two], tmp_path / "two"), timeout=300.0)[0]
    assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in wanted], abs=2e-4)
    assert given[0]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm_server": "http://a:1"}, "--vllm-server applies only to --vllm-mode server"),
        ({"vllm_mode": "server", "vllm_sleep": True}, "--vllm-sleep applies only to --vllm-mode colocate"),
        ({"use_vllm": False}, "--vllm-mode applies to vLLM, which is not used: add --use-vllm"),
        ({"vllm_tensor_parallel_size": 3}, "--vllm-tensor-parallel-size 3 does not divide 2 process"),
        ({"tools": [f"{TOOLS}:add"], "vllm_sleep": True}, "--tools and --vllm-sleep: vLLM wakes up without weights"),
        (
            {"tools": [f"{TOOLS}:add"], "vllm_tensor_parallel_size": 2},
            "--tools and --vllm-tensor-parallel-size: processes that share a vLLM call it at once",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], said: str) -> None:
    from shardproof.train.rlhf.tools import check_tools

    given: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "per_device_batch_size": 8, **options}
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["format"], **given)
    with pytest.raises(ConfigError, match=said):
        check_algorithm(config, config.batch(2))
        check_tools(config)


def test_it_has_room_for_rows_and_answers_as_far_as_the_model_goes() -> None:
    from transformers import Qwen3Config

    options: dict[str, Any] = {"rlhf_type": "grpo", "max_length": 400, "max_completion_length": 200}
    for positions, said, room in ((4096, None, 600), (512, None, 512), (512, 300, 300)):
        config = RlhfConfig(**options, vllm_max_model_len=said)
        assert room_of(config, Qwen3Config(max_position_embeddings=positions)) == room


def test_where_nothing_has_room_is_told_before_anything_is_loaded(
    models: dict[str, Path], files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argv = command(models, files, "grpo", "--per-device-batch-size", "8")
    for said, wanted in (
        (99999, "--vllm-max-model-len 99999: .* has 1024 positions, and vLLM does not start with more"),
        (
            5,
            r"prompts.jsonl:\d+: the prompt has \d+ tokens, and --vllm-max-model-len 5, so there is no room for",
        ),
    ):
        with pytest.raises(ConfigError, match=wanted):
            prepared_for(argv, 1, [{"vllm_max_model_len": said}], tmp_path / str(said))
        assert not (tmp_path / str(said)).exists()
    assert "ends answers" not in caplog.text
    (fits,) = prepared_for(argv, 1, [{}], tmp_path / "fits")
    tight = {"vllm_max_model_len": fits.rows.report.longest_kept + 3}
    prepared_for(argv, 1, [tight], tmp_path / "tight")
    assert "vLLM ends answers to the longest prompts" in caplog.text


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_model_with_packed_weights_is_refused(mode: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}')
    options: dict[str, Any] = {"rlhf_type": "grpo", "reward_funcs": ["format"], "use_vllm": True, "vllm_mode": mode}
    with pytest.raises(ConfigError, match=f"packed weights.*\n.*shardproof export {tmp_path} FOLDER"):
        check_fits(RlhfConfig(model=str(tmp_path), **options), rows=None)


def test_answers_may_call_functions_where_each_rank_asks_its_own() -> None:
    from shardproof.train.rlhf.tools import check_tools

    given: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "tools": [f"{TOOLS}:add"]}
    check_tools(RlhfConfig(rlhf_type="grpo", reward_funcs=["format"], **given))
