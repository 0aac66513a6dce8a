"""Loops as Accelerate's documentation has them, run with the import line changed: the numbers of one process.

The reference is the same loop on Accelerate's own Accelerator, as it stands, in one process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distributed.pool import RemoteError
from shardproof.errors import ConfigError, EngineError

IMPORTS = 240.0  # seconds: the first test in a rank imports Accelerate, on a busy machine slowly
LOOPS = Path(__file__).with_name("loops")
IMPORT, OURS = "from accelerate import Accelerator\n", "from shardproof.integrations.accelerate import Accelerator\n"


def fresh() -> None:
    """Accelerate keeps its state in singletons: forget that of the loop before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run_loop(name: str, stage: int | None, *args: Any) -> dict[str, list[float]]:
    """Run a loop as it stands, or at a stage with the import line changed and the stage given."""
    text = (LOOPS / name).with_suffix(".py").read_text()
    assert text.count(IMPORT) == 1
    if stage is not None:
        assert text.count("Accelerator(") == 1
        text = text.replace(IMPORT, OURS).replace("Accelerator(", f"Accelerator(stage={stage}, ").replace(", )", ")")
    sys.path.insert(0, str(LOOPS))
    fresh()
    scope: dict[str, Any] = {"__name__": name}
    try:
        exec(compile(text, name, "exec"), scope)
        return scope["main"](*args)
    finally:
        sys.path.remove(str(LOOPS))
        fresh()


def close(got: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        assert got[key] == pytest.approx(values, abs=1e-6), key


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["training", "accumulation", "by_hand", "evaluation"])
def test_a_loop_equals_one_process(run2, name: str, stage: int) -> None:
    expected = run_loop(name, None, 8)
    for got in run2(run_loop, name, stage, 4, timeout=IMPORTS):
        close(got, expected)


def run_where_no_gpu_is(name: str, stage: int, batch: int) -> dict[str, list[float]]:
    """As a build of torch for CUDA does it on a machine without a GPU: its accelerator has a name."""

    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", named):
        return run_loop(name, stage, batch)


def test_a_build_for_cuda_without_a_gpu(run2) -> None:
    expected = run_loop("training", None, 8)
    for got in run2(run_where_no_gpu_is, "training", 3, 4, timeout=IMPORTS):
        close(got, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_taken_out_whole(run2, tmp_path: Path, stage: int) -> None:
    expected = run_loop("saving", None, 8, str(tmp_path / "plain"))
    first, other = run2(run_loop, "saving", stage, 4, str(tmp_path / "sharded"), timeout=IMPORTS)
    close(first, expected)
    assert other == {}
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("plain", "sharded")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 3), (1, 3)])
def test_a_loop_goes_on_where_it_was_saved(run2, tmp_path: Path, before: int, after: int) -> None:
    """In the middle of an epoch, also at another stage."""
    expected = run_loop("checkpointing", None, 8, "", 0, 0)
    folder = str(tmp_path / "state")
    first = run2(run_loop, "checkpointing", before, 4, folder, 6, 0, timeout=IMPORTS)[0]
    second = run2(run_loop, "checkpointing", after, 4, folder, 0, 6, timeout=IMPORTS)[0]
    joined = {key: first.get(key, []) + second[key] for key in second}
    close(joined, expected)


def hooks(folder: str) -> None:
    """Hooks see the models and their weights, and may take both from the lists that they get, as those of diffusers'
    scripts do; folders are named and counted as Accelerate does it."""
    from accelerate.utils import ProjectConfiguration

    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_model

    fresh()
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(stage=3, project_config=project)
    models = [make_model(), make_model()]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    *models, optimizer = accelerator.prepare(*models, optimizer)
    seen: list[Any] = []
    names = [sorted(model.state_dict()) for model in models]

    def saving(given: list[Any], weights: list[Any], where: str) -> None:
        seen.append((list(given), [sorted(one) for one in weights], where))
        for model in given:  # which the main process would save by itself
            assert torch.equal(weights.pop()["head.bias"], model.head.bias)

    def loading(given: list[Any], where: str) -> None:
        seen.append((list(given), where))
        given.clear()

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    for _ in range(2):
        accelerator.save_state()
    assert sorted(p.name for p in Path(folder, "checkpoints").iterdir()) == ["checkpoint_1"]
    with torch.no_grad():
        models[0].head.bias.add_(1.0)
    accelerator.load_state()
    assert torch.equal(models[0].state_dict()["head.bias"], make_model().head.bias)
    assert [entry[0] for entry in seen] == [models] * 3
    assert seen[0][1] == seen[1][1] == names
    assert accelerator._models == models
    fresh()


def test_hooks_and_folders(run2, tmp_path: Path) -> None:
    run2(hooks, str(tmp_path), timeout=IMPORTS)


def saved_on_one(folder: str) -> None:
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_model

    fresh()
    accelerator = Accelerator(stage=3)
    accelerator.prepare(make_model())
    accelerator.register_save_state_pre_hook(lambda models, weights, where: models[0].head.bias.sum().item())
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.gather(torch.ones(2))  # which waits for all, too


def test_a_state_that_the_main_process_saves_alone_is_told_as_that(run2, tmp_path: Path) -> None:
    """It was taken for the others' next gather, and the run ended in a timeout that spoke of barriers."""
    with pytest.raises(RemoteError) as caught:  # which ends the pool, too: its ranks have fallen apart
        run2(saved_on_one, str(tmp_path), timeout=IMPORTS)
    for rank, wants in enumerate(("collect the state dict", "wait for all ranks")):
        # Other models may be there, which earlier tests have left: the text numbers them then.
        told = rf"rank {rank} wants to {wants}( of the model .*)?, at .*test_loops.py:\d+ \(saved_on_one\)"
        assert re.search(told, str(caught.value)), str(caught.value)


def low_precision(stage: int) -> tuple[float, float]:
    """Weights are gathered in bf16, masters stay float32, what the model returns is float32."""
    import shardproof
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_data, make_model

    fresh()
    accelerator = Accelerator(stage=stage, mixed_precision="bf16")
    plain, model = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_data(32, 4))
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    whole = make_data(32, 8)
    for (inputs, targets), (all_inputs, all_targets) in zip(loader, whole, strict=True):
        outputs = model(inputs)
        assert outputs.dtype == torch.float32
        accelerator.backward(torch.nn.functional.cross_entropy(outputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(all_inputs), all_targets).backward()
        other.step()
        other.zero_grad()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    weights = shardproof.full_state_dict(model, rank0_only=False)
    start, end = make_model().state_dict(), plain.state_dict()
    error = max(float((weights[name] - end[name]).abs().max()) for name in end)
    moved = max(float((start[name] - end[name]).abs().max()) for name in end)
    fresh()
    return error, moved


def test_bf16_stays_near_float32(run2) -> None:
    for error, moved in run2(low_precision, 3, timeout=IMPORTS):
        assert error < 0.03 * moved


def several_models() -> None:
    """A trained model and a frozen one, each at its own stage, in one Accelerator."""
    import shardproof
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_data, make_model

    fresh()
    accelerator = Accelerator(stage=2, shard_options={"dynamic": "never"})
    reference = shardproof.shard(make_model().requires_grad_(False), 3)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, model, reference, loader = accelerator.prepare(optimizer, model, reference, make_data(8, 4))
    for inputs, _ in loader:
        with torch.no_grad():
            target = reference(inputs)
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        assert loss.item() == pytest.approx(0.0, abs=1e-12)
        accelerator.backward(loss)
        optimizer.step()
    assert (model.__dict__["_shardproof"].stage, reference.__dict__["_shardproof"].stage) == (2, 3)
    fresh()


def test_several_models(run2) -> None:
    run2(several_models, timeout=IMPORTS)


def apart(stage: int) -> list[list[int]]:
    """Processes that run the model a different number of times, and then gather what came out."""
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_data, make_model

    fresh()
    accelerator = Accelerator(stage=stage)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_data(16, 4))
    lengths = []
    for number, (inputs, targets) in enumerate(loader):
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        rows = inputs[:1]
        with torch.no_grad():
            for _ in range(1 + 4 * (accelerator.process_index == number % 2)):
                rows = torch.cat([rows, model(rows[-1:]).repeat(1, 2)])
        padded = accelerator.pad_across_processes(rows)
        lengths.append(accelerator.gather_for_metrics(torch.tensor([len(rows)])).tolist())
        assert accelerator.gather(padded).shape == (12, 6)
        accelerator.wait_for_everyone()
    fresh()
    return lengths


@pytest.mark.parametrize("stage", [0, 3])
def test_processes_that_differ_meet_before_they_gather(run2, stage: int) -> None:
    assert run2(apart, stage, timeout=IMPORTS) == [[[6, 2], [2, 6]]] * 2


def alone(where: str, folder: str) -> list[float]:
    """The main process looks at the model by itself, and all go on to what Accelerate does on all of them."""
    from accelerate.utils import DataLoaderConfiguration

    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_data, make_model

    fresh()
    dealt_out = DataLoaderConfiguration(dispatch_batches=where == "a batch that is dealt out")
    accelerator = Accelerator(
        stage=3, dataloader_config=dealt_out, shard_options={"inference_memory": 0, "desync_timeout": 10.0}
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shuffled = torch.utils.data.DataLoader(make_data(16, 4).dataset, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, shuffled)

    def look() -> None:
        if accelerator.is_main_process:
            with torch.no_grad():
                model(torch.ones(1, 6))

    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if where == "a batch that is dealt out":
                look()
        if where == "an epoch":
            look()
    if where == "save_state":
        look()
        accelerator.save_state(folder)
        look()
        accelerator.load_state(folder)
    elif where == "save_model":
        look()
        accelerator.save_model(model, folder)
    elif where == "batches that are skipped":
        look()
        list(accelerator.skip_first_batches(loader, 1))
    elif where == "main_process_first":
        with accelerator.main_process_first():
            look()
        with accelerator.local_main_process_first():
            look()
    elif where == "end_training":
        look()
        with mock.patch("torch.distributed.destroy_process_group"):  # it is that of the tests after this one
            accelerator.end_training()
    accelerator.wait_for_everyone()
    fresh()
    return losses


PLACES = ("an epoch", "a batch that is dealt out", "batches that are skipped", "save_state", "save_model")


@pytest.mark.parametrize("where", [*PLACES, "main_process_first", "end_training"])
def test_the_main_process_may_compute_by_itself(run2, tmp_path: Path, where: str) -> None:
    first, second = run2(alone, where, str(tmp_path), timeout=IMPORTS)
    assert first == second
    assert len(first) == 4


def saved_by_transformers(folder: str) -> None:
    """As the documentation saves a transformers model: with the state dict of the main process, or without."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardproof.integrations.accelerate import Accelerator

    fresh()
    torch.manual_seed(torch.distributed.get_rank())
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    accelerator = Accelerator(stage=3)
    model = accelerator.prepare(model)
    unwrapped = accelerator.unwrap_model(model)
    for name, given in (("given", {"state_dict": accelerator.get_state_dict(model)}), ("asked", {})):
        where = f"{folder}/{name}"
        writer = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        unwrapped.save_pretrained(where, **writer, **given)
        accelerator.wait_for_everyone()
        read = LlamaForCausalLM.from_pretrained(where).state_dict()
        weights = unwrapped.state_dict()
        assert read.keys() == weights.keys()
        assert all(torch.equal(read[key], weights[key]) for key in read)
    told = pytest.raises(ConfigError, match="processes that leave the loop early")
    with told, accelerator.join_uneven_inputs([model], even_batches=False):
        pass
    with accelerator.join_uneven_inputs([model]):
        pass
    fresh()


def test_transformers_models_are_saved(run2, tmp_path: Path) -> None:
    run2(saved_by_transformers, str(tmp_path), timeout=IMPORTS)


def adapters_saved(folder: str) -> None:
    """As Accelerate's documentation has it: PEFT picks on every process what the main one writes."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_data, make_model

    def adapted() -> Any:
        return get_peft_model(make_model(), LoraConfig(target_modules=["inner"], modules_to_save=["head"]))

    fresh()
    accelerator = Accelerator(stage=3)
    model = adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_data(8, 4))
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    weights = accelerator.get_state_dict(model)
    entries = model.state_dict()
    assert weights.keys() <= entries.keys()
    assert (weights.keys() == entries.keys()) == accelerator.is_main_process
    unwrapped, main = accelerator.unwrap_model(model), accelerator.is_main_process
    unwrapped.save_pretrained(folder, is_main_process=main, save_function=accelerator.save, state_dict=weights)
    accelerator.wait_for_everyone()
    read = PeftModel.from_pretrained(make_model(), folder).state_dict()
    assert read.keys() == entries.keys()
    assert all(torch.equal(read[key], entries[key]) for key in read)
    assert not torch.equal(entries["base_model.model.head.modules_to_save.default.weight"], make_model().head.weight)
    fresh()


def test_adapters_and_what_is_saved_beside_them(run2, tmp_path: Path) -> None:
    run2(adapters_saved, str(tmp_path), timeout=IMPORTS)


def alone_among_others(by: str, folder: str) -> str:
    """As where ranks were started without a launcher: torch knows of them, and Accelerate does not."""
    from transformers import Trainer, TrainingArguments

    from shardproof.integrations.accelerate import Accelerator
    from shardproof.integrations.transformers import sharded

    fresh()
    model = torch.nn.Linear(1, 1)
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        with pytest.raises(ConfigError) as caught:
            if by == "Trainer":
                args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
                sharded(Trainer)(model=model, args=args, train_dataset=[{"x": 1}]).train()
            else:
                Accelerator().prepare(model)
    fresh()
    return str(caught.value)


@pytest.mark.parametrize("by", ["Trainer", "Accelerator"])
def test_ranks_that_would_all_train_on_all_rows_are_refused(run2, tmp_path: Path, by: str) -> None:
    for text in run2(alone_among_others, by, str(tmp_path), timeout=IMPORTS):
        assert "sees 1 process, but 2 processes share the model" in text


def test_other_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.integrations.accelerate import Accelerator

    fresh()
    with pytest.raises(ConfigError, match=r"fsdp_plugin=.*pass stage="):
        Accelerator(fsdp_plugin=object())
    with pytest.raises(EngineError, match="stage=4 does not exist"):
        Accelerator(stage=4).prepare(torch.nn.Linear(1, 1))
    fresh()


@pytest.mark.parametrize(("hook", "asks"), [("FP16", True), ("POWER_SGD", True), ("NO", False)])
def test_hooks_of_ddp_that_reduce_otherwise_are_refused(hook: str, asks: bool) -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from shardproof.integrations.accelerate import Accelerator

    fresh()
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook], find_unused_parameters=True)
    told = pytest.raises(ConfigError, match=rf"comm_hook={hook}.*Leave it out") if asks else contextlib.nullcontext()
    with told:
        Accelerator(kwargs_handlers=[handler])
    fresh()


def test_an_optimizer_that_steps_inside_of_backward_is_refused() -> None:
    from shardproof.integrations.accelerate import Accelerator

    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, rate: float) -> None: ...

    fresh()
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="Fused changes weights inside backward"):
        Accelerator().prepare(model, Fused(model.parameters()))
    fresh()


def saved_in_parts(stage: int, folder: str) -> tuple[int, bool]:
    """How many bytes were gathered for it, and whether Accelerate loads what was written."""
    from accelerate import load_checkpoint_in_model

    import shardproof
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    from parts import make_model

    def tied() -> torch.nn.Module:
        model = make_model()
        model.other = torch.nn.Linear(*reversed(model.head.weight.shape))
        model.other.weight = model.head.weight
        model.register_buffer("seen", torch.arange(5))
        return model

    fresh()
    accelerator = Accelerator(stage=stage)
    model = accelerator.prepare(tied())
    with torch.no_grad():
        model.head.weight.add_(1.0)
    before = shardproof.stats(model).total.bytes_gathered
    accelerator.save_model(model, folder, max_shard_size=400)
    gathered = shardproof.stats(model).total.bytes_gathered - before
    expected, other = shardproof.full_state_dict(model, rank0_only=False), tied()
    load_checkpoint_in_model(other, folder)
    same = all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    fresh()
    return gathered, same


@pytest.mark.parametrize("stage", [0, 3])
def test_save_model_writes_from_all_processes(run2, tmp_path: Path, stage: int) -> None:
    """Nothing is gathered; files of an earlier save go, and no others."""
    folder = tmp_path / "new" / "saved"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "model-00001-of-00099.safetensors", "model_ema.safetensors"):
        (folder / name).write_bytes(b"old")
    assert run2(saved_in_parts, stage, str(folder), timeout=IMPORTS) == [(0, True)] * 2
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors.index.json" in names
    assert names & {"model.safetensors", "model-00001-of-00099.safetensors"} == set()
    assert (folder / "model_ema.safetensors").read_bytes() == b"old"
