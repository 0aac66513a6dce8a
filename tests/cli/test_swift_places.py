"""What ms-swift's infer and export say in options, in the places where it stands here."""

import pytest

from shardproof.cli.export import ExportConfig
from shardproof.cli.from_swift.places import placed
from shardproof.cli.infer_asked import InferConfig
from shardproof.errors import ConfigError

KNOWN = {"infer": InferConfig.model_fields, "export": ExportConfig.model_fields}


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("infer", "--adapters run --stream true", "run --stream true"),
        ("infer", "--ckpt-dir run --model base", "run"),
        (
            "infer",
            "--model base --infer-backend pt --val-dataset f --max-batch-size 8",
            "base --dataset f --batch-size 8",
        ),
        ("infer", "run --prompt x", "run --prompt x"),
        (
            "infer",
            "--model m --infer_backend vllm --vllm_tensor_parallel_size 2 --vllm-max-model-len 4096",
            "m --backend vllm --nproc 2 --vllm-max-model-len 4096",
        ),
        ("infer", "run --padding-side left --model-kwargs {} --load-from-cache-file true", "run"),
        ("infer", "run --deepspeed zero3 --hepl", "run --deepspeed zero3 --hepl"),
        ("infer", """run --columns {"q":"query","a":"response"}""", "run --columns query=q response=a"),
        ("infer", "run --columns query=q,response=a", "run --columns query=q,response=a"),
        ("infer", "run --enable-thinking false", "run --template-variables enable_thinking=false"),
        ("infer", "run --use-chat-template false", "run --plain yes"),
        ("export", "--adapters run/x/ --merge-lora true", "run/x/ run/x-merged"),
        (
            "infer",
            "--model m --top_k -1 --repetition-penalty 1.1 --num-beams 2 --stop-words a b",
            "m --top-k 0 --repetition-penalty 1.1 --num-beams 2 --stop-words a b",
        ),
        ("export", "--model m --output-dir out --torch-dtype bfloat16", "m out --dtype bf16"),
        ("export", "run out --dtype bf16", "run out --dtype bf16"),
        ("export", "--model m --quant-method fp8", "m m-fp8 --quantize fp8"),
        (
            "export",
            "--adapters r --quant-method gptq --quant-bits 4 --dataset a b --quant-n-samples 9 --group-size 64",
            "r r-int4 --dataset a b --samples 9 --group-size 64 --quantize int4",
        ),
        (
            "export",
            "--model m --quant-method awq --quant-bits 4 --quant-batch-size -1 --dataset a#5 --max-length 512",
            "m m-int4 --dataset a#5 --max-length 512 --quantize int4",
        ),
        (
            "export",
            "--model m --quant-bits 8 --quant-method gptq_v2 --dataset a",
            "m m-int8 --dataset a --quantize int8",
        ),
        (
            "export",
            "--model m --quant-bits 8 --quant-method gptq --group-size 128 --dataset a",
            "m m-int8 --dataset a --quantize int8",
        ),
        (
            "export",
            "--model m --quant-bits 4 --quant-method bnb --bnb-4bit-quant-type nf4 --bnb-4bit-use-double-quant true",
            "m m-nf4 --quantize nf4",
        ),
        ("export", "m out --quantize int4 --dataset a", "m out --quantize int4 --dataset a"),
    ],
)
def test_a_command_is_the_one_here(command, theirs, ours):
    assert placed(command, theirs.split(), KNOWN[command])[0] == ours.split()


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("infer", "run --adapters other", "--adapters and run both name the run"),
        ("infer", "--adapters a b", "give one folder"),
        ("infer", "--model m --infer-backend lmdeploy", "--backend takes transformers and vllm"),
        ("infer", "--model m --logprobs true", "vllm serve FOLDER"),
        ("infer", "--model m --per-device-train-batch-size 2", "an ms-swift option without an equivalent here"),
        ("export", "--model m --to-cached-dataset true", "'shardproof data encode' does that"),
        (
            "export",
            "--model m --quant-method hqq --quant-bits 4",
            "--quant-method hqq --quant-bits 4: an ms-swift option",
        ),
        ("export", "--model m --quant-method bnb --quant-bits 8", "int8 is the fastest 8-bit format"),
        ("export", "--model m --quant-method gptq --quant-bits 4", "without --dataset: .* name rows to calibrate with"),
        ("export", "--model m --quant-method fp8 --load-data-args true", "--dataset names the rows to calibrate with"),
        ("export", "--model m --quant-bits 4", "--quant-bits 4: an ms-swift option without an equivalent"),
    ],
)
def test_what_has_no_equivalent_is_refused(command, given, said):
    with pytest.raises(ConfigError, match=said):
        placed(command, given.split(), KNOWN[command])


def test_what_has_no_effect_is_told():
    notes = placed("infer", "--adapters run --model base --merge-lora true".split(), KNOWN["infer"])[1]
    assert notes == ["--merge-lora (adapters are used unmerged)", "--model (given by --adapters)"]
    notes = placed(
        "infer",
        "--model m --task-type seq_cls --num-labels 2 --truncation-strategy delete --max-length 2048".split(),
        KNOWN["infer"],
    )[1]
    assert notes == [
        "--task-type (it is read from the model)",
        "--num-labels (it is read from the model)",
        "--truncation-strategy (questions are never cut)",
        "--max-length (questions are never cut)",
    ]
