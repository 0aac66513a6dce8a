"""--init-lora-weights: adapters begin as PEFT's do, on any number of processes. Those that begin as a part of the
weights are saved as adapters of the weights as they were, go on from checkpoints, and are merged into what was trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardproof.cli import training
from shardproof.errors import CheckpointError, ConfigError
from shardproof.train.adapters.beginning import begin_adapters, check_beginning, check_begun
from shardproof.train.adapters.begun import adapter_folder
from shardproof.train.answers.loaded import on_base
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig

pytestmark = pytest.mark.slow

LORA = ["--tuner", "lora", "--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "3e-3", "--init-lora-weights"]
TWO = ["--nproc", "2", "--stage", "3"]
KINDS = {
    "pissa": ["pissa", "--target-modules", "q_proj", "down_proj", "--modules-to-save", "lm_head"],
    "pissa_niter_2": ["pissa_niter_2"],
    "olora": ["olora", "--dora", "--rslora"],
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "olora" else pytest.mark.slow) for name in KINDS]
)
def runs(request, commands, sft):
    more = [*LORA, *KINDS[request.param]]
    return commands(
        [
            ("one", sft("--nproc", "1", "--stage", "0", *more)),
            ("two", sft(*TWO, *more, "--save-steps", "3")),
            ("resumed", sft("--nproc", "1", "--stage", "1", *more, "--resume", "RUNS/two/checkpoint-3")),
            ("late", ["export", "RUNS/two/checkpoint-5", "OUT"]),
            ("without", sft("--max-steps", "1")),
        ]
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_processes_and_stages_give_the_same_losses(runs) -> None:
    for run in runs.values():
        assert run.code == 0, run.output
    losses = runs["one"].series("loss")
    assert losses[-1] < losses[0] - 0.01
    assert losses[0] == pytest.approx(runs["without"].series("loss")[0], abs=1e-5)  # they begin as the base
    assert runs["two"].series("loss") == pytest.approx(losses, abs=1e-5)
    assert runs["resumed"].series("loss") == pytest.approx(losses[3:], abs=1e-5)


def test_what_is_saved_are_adapters_of_the_base(runs, tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapters = runs["two"].folder / "model"
    said = json.loads((adapters / "adapter_config.json").read_text())
    assert (said["r"], said["init_lora_weights"]) == (8, True)
    assert f"adapter: {adapters} (of rank 8, for the model as it was)" in runs["two"].output
    before = logits(AutoModelForCausalLM.from_pretrained(tiny))
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), adapters))
    merged = logits(AutoModelForCausalLM.from_pretrained(runs["late"].folder))
    resumed = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), runs["resumed"].folder / "model")
    assert (merged - adapted).abs().max() < 1e-4  # of a checkpoint, whose adapters are on what is left of the base
    assert (logits(resumed) - adapted).abs().max() < 1e-3
    assert (merged - before).abs().max() > 1e-2


def of_peft(folder: Path, tiny: Path, kind: str) -> Path:
    """Adapters that PEFT has saved as they are."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=kind)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_2", "olora", "mica"])
def test_adapters_of_changed_weights_are_not_trained_on(tmp_path: Path, tiny: Path, kind: str) -> None:
    """PEFT would change the weights again, which are still to be read."""
    folder = of_peft(tmp_path, tiny, kind)
    text = "MiCA trains one of its two matrices" if kind == "mica" else "path_initial_model_for_weight_conversion"
    with pytest.raises(ConfigError, match=text):
        adapter_folder(str(folder))


@pytest.mark.parametrize("kind", [pytest.param("gaussian", marks=pytest.mark.slow), "orthogonal"])
def test_adapters_that_have_begun_beside_the_weights_are_trained_on(
    commands, sft, tmp_path: Path, tiny: Path, kind: str
) -> None:
    of_peft(tmp_path, tiny, kind)
    more = ["--max-steps", "1"]
    runs = commands([("on", sft(*more, "--adapters", str(tmp_path))), ("base", sft(*more))])
    assert runs["on"].code == 0, runs["on"].output
    assert runs["on"].series("loss") == pytest.approx(runs["base"].series("loss"), abs=1e-5)


def test_what_asks_such_adapters_says_so(tmp_path: Path, tiny: Path) -> None:
    """Whole weights PEFT changes again, if it would do it the same way."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    from shardproof.integrations.pretrained import without_values

    def whole() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tiny)

    pissa, drawn = (of_peft(tmp_path / kind, tiny, kind) for kind in ("pissa", "pissa_niter_2"))
    assert (logits(on_base(whole(), pissa, str(tiny))) - logits(whole())).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="in one process, which changes them again"):
        on_base(without_values(LlamaForCausalLM, str(tiny)), pissa, str(tiny))
    with pytest.raises(ConfigError, match="initialised with pissa_niter_2, which changes the base weights"):
        on_base(whole(), drawn, str(tiny))


def parsed(*words: str, kind: type = SftConfig):
    return training.parse(kind, "", ["--model", "m", "--dataset", "d", *words])[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["eva"], "must be one of gaussian, .*and not eva, which is computed from rows of data"),
        (["lora_ga"], "computed from rows"),
        (["loftq"], "four bits"),
        (["pissa_niter_"], "must be one of"),
    ],
)
def test_other_beginnings_are_named(words: list[str], text: str) -> None:
    for kind in (SftConfig, RlhfConfig):
        with pytest.raises(ConfigError, match=text):
            parsed("--tuner", "lora", "--init-lora-weights", *words, kind=kind)


def test_adapters_begin_once() -> None:
    with pytest.raises(ConfigError, match="applies to new adapters, and those of --adapters already exist"):
        check_beginning(SftConfig(tuner="lora", adapters="a", init_lora_weights="gaussian"))


def test_what_cannot_begin_so_is_refused_before_anything_is_read(commands, sft) -> None:
    cases = {
        "full": (["--init-lora-weights", "pissa"], "applies to adapters"),
        "packed": ([*LORA, "pissa", "--quantize", "nf4"], "PEFT needs unpacked weights"),
        "odd": ([*LORA, "orthogonal", "--lora-rank", "3"], "needs an even rank, but --lora-rank is 3"),
        "large": ([*LORA, "olora", "--lora-rank", "512"], "and --lora-rank is 512. Leave it out of --target-modules"),
        "head": ([*LORA, "pissa", "--target-modules", "q_proj", "lm_head"], "shares its weight with another module"),
        "words": ([*LORA, "pissa", "--target-modules", "embed_tokens"], "is of the class Embedding"),
    }
    runs = commands([(name, sft(*words)) for name, (words, _) in cases.items()])
    for name, (_, text) in cases.items():
        assert runs[name].code == 2, runs[name].output
        assert text in " ".join(runs[name].output.split()), runs[name].output
        assert not (runs[name].folder / "config.yaml").exists()


def test_a_run_goes_on_only_with_what_its_adapters_began_with(commands, sft) -> None:
    more = [*LORA, "pissa", "--target-modules", "q_proj"]
    (first,) = commands([("first", sft(*more, "--save-steps", "2", "--max-steps", "2"))]).values()
    assert first.code == 0, first.output
    (first.folder / "begun-adapters.safetensors").unlink()
    start = str(first.folder / "checkpoint-2")
    runs = commands([("on", sft(*more, "--resume", start)), ("merged", ["export", start, "OUT"])])
    for run in runs.values():
        assert run.code == 2, run.output
        assert "which records what --init-lora-weights pissa took out" in " ".join(run.output.split())


def test_what_adapters_began_with_is_written_and_read_as_other_weights_are(tmp_path: Path) -> None:
    """Whoever may read the run can make something of its checkpoints. A full disk and a file that was cut off are told
    by name."""
    from peft import LoraConfig, get_peft_model

    from zero.language_models import tiny

    config = SftConfig(tuner="lora", lora_rank=4, init_lora_weights="pissa")
    model = get_peft_model(tiny("Llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match=r"begun-adapters.safetensors cannot be written: .*No such file"):
        begin_adapters(model, config, [], tmp_path / "nowhere")
    said, file = tmp_path / "config.yaml", tmp_path / "begun-adapters.safetensors"
    said.touch(0o640)
    begin_adapters(model, config, [], tmp_path)
    assert file.stat().st_mode == said.stat().st_mode
    check_begun(config, tmp_path / "checkpoint-2")
    large = get_peft_model(tiny("Llama"), LoraConfig(r=8, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight has shape \(4, 16\) in the file of initial adapters"):
        begin_adapters(large, config, [tmp_path / "checkpoint-2"])
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"begun-adapters.safetensors is truncated"):
        check_begun(config, tmp_path / "checkpoint-2")
