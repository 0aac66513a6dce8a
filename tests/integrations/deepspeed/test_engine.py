"""The engine's methods do what DeepSpeed's users rely on, at every stage."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof.integrations.deepspeed as deepspeed
from integrations.deepspeed.plain import Net
from shardproof.errors import CheckpointError, ConfigError, EngineError, NonFiniteError
from shardproof.integrations.deepspeed.scaling import LossScale
from shardproof.integrations.deepspeed.sections import Fp16
from shardproof.zero.device import default_device

SLOW = pytest.mark.slow
BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def begin(stage: int, model: nn.Module | None = None, **changes: Any) -> Any:
    config = BASE | {"zero_optimization": {"stage": stage}} | changes
    return deepspeed.initialize(model=model or net(), config=config)[0]


def batch(number: int = 0, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a batch."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def plain_step(model: nn.Module, clip: float, *, rows: list[Any], lr: float = 0.1) -> float:
    """One step of one plain process over whole micro-batches. Returns the norm."""
    for x, y in rows:
        (model(x, y) / len(rows)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
    torch.optim.SGD(model.parameters(), lr=lr).step()
    model.zero_grad()
    return norm


def whole_batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


# --- ways to accumulate --------------------------------------------------------------------------------


def every_way(stage: int) -> dict[str, float]:
    """Two micro-batches a step, in each way there is; the distance of the weights to one process."""
    reference = net()
    norm = plain_step(reference, 1.0, rows=[whole_batch(0), whole_batch(1)])
    expected, results = weights(reference), {}

    def check(name: str, engine: Any) -> None:
        assert engine.get_global_grad_norm() == pytest.approx(norm, abs=1e-6)
        assert engine.was_step_applied()
        results[name] = far(weights(engine.module), expected)

    engine = begin(stage, gradient_accumulation_steps=2)
    for number in range(2):
        loss = engine(*batch(number))
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
        engine.step()
    check("counted", engine)

    engine = begin(stage, gradient_accumulation_steps=2)
    for number in range(2):
        engine.set_gradient_accumulation_boundary(number == 1)
        engine.backward(engine(*batch(number)))
    engine.step()
    check("said", engine)

    engine = begin(stage, gradient_accumulation_steps=2)
    for number in range(2):
        engine(*batch(number)).backward()
        engine.step()
    check("direct", engine)

    engine = begin(stage, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    for number in range(2):
        engine.backward(engine(*batch(number)))
    engine.step()
    check("unmanaged", engine)

    engine = begin(stage)
    with engine.no_sync():
        engine.backward(engine(*batch(0)) / 2)
    engine.backward(engine(*batch(1)) / 2)
    engine.step()
    check("no_sync", engine)

    engine = begin(stage, gradient_accumulation_steps=2)
    engine.backward(engine(*batch(0)) / 2, scale_wrt_gas=False)
    engine.step()
    engine.backward(engine(*batch(1)) / 2, scale_wrt_gas=False)
    engine.step()
    check("unscaled", engine)
    return results


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_every_way_to_accumulate_equals_one_process(run2, stage: int) -> None:
    for results in run2(every_way, stage):
        assert len(results) == 6
        assert all(error < 1e-6 for error in results.values()), results


class Telling(Net):
    """Returns what it computed on the way, too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        hidden = self.blocks[0](self.embed(x))
        deeper = self.blocks[2](self.blocks[1](hidden))
        return {"loss": nn.functional.mse_loss(self.head(deeper), y), "hidden": (hidden, deeper), "name": "a"}


def direct_over_outputs(fp16: bool) -> tuple[float, float]:
    """`loss.backward()` without the engine, of a loss over outputs of which one is computed from the other."""

    def loss_of(outputs: dict[str, Any]) -> torch.Tensor:
        return outputs["loss"] + 0.1 * sum(h.square().mean() for h in outputs["hidden"])

    def telling() -> Telling:
        torch.manual_seed(0)
        return Telling()

    reference = telling()
    for number in range(2):
        (loss_of(reference(*whole_batch(number))) / 2).backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), math.inf))
    section = {"enabled": fp16, "initial_scale_power": 4}
    engine = begin(3, telling(), gradient_accumulation_steps=2, fp16=section)
    for number in range(2):
        outputs = engine(*batch(number))
        assert outputs["name"] == "a"
        loss = loss_of(outputs)
        (engine.scale(loss) if fp16 else loss).backward()
        engine.step()
    return engine.get_global_grad_norm(), expected


@pytest.mark.parametrize("fp16", [False, True])
def test_outputs_that_come_from_each_other(run2, fp16: bool) -> None:
    for norm, expected in run2(direct_over_outputs, fp16):
        assert norm == pytest.approx(expected, rel=1e-2 if fp16 else 1e-6)


def two_engines() -> float:
    """One loss over two engines: each divides its part by the accumulation steps once."""
    reference, other = net(), net()
    x, y = whole_batch()
    (reference(x, y) + 3 * other(x, 2 * y)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    one, two = (begin(stage, gradient_clipping=0.0, gradient_accumulation_steps=1) for stage in (2, 3))
    x, y = batch()
    loss = one(x, y) + 3 * two(x, 2 * y)
    one.backward(loss)
    one.step()
    two.step()
    return far(weights(one.module), weights(reference))


def test_a_loss_over_two_engines(run2) -> None:
    assert max(run2(two_engines)) < 1e-6


# --- what it is made of --------------------------------------------------------------------------------


def parts(stage: int) -> None:
    """A client's optimizer and schedule, made before or by a function; a loader; a frozen model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = [(torch.randn(6), torch.randn(3)) for _ in range(8)]
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine, same, loader, same_schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, training_data=data, config_params=config
    )
    assert (same, same_schedule, engine.optimizer) == (optimizer, schedule, optimizer)
    assert engine.module is model
    assert len(loader) == 2
    for x, y in loader:
        assert len(x) == engine.train_micro_batch_size_per_gpu() == 2
        engine.backward(engine(x, y))
        engine.step()
    assert engine.get_lr() == [0.025]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 2, 8)
    assert engine.blocks is model.blocks  # what the engine lacks is the model's
    with pytest.raises(
        AttributeError, match="Neither this DeepSpeedEngine of shardproof nor its Net has 'offload_states'"
    ):
        engine.offload_states()
    assert not hasattr(engine, "offload_states")

    made = deepspeed.initialize(
        model=net(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 10),
        config=config,
    )
    assert made[0].get_lr() == [0.1]

    frozen = net().requires_grad_(False)
    reference, none, _, _ = deepspeed.initialize(model=frozen, config=config)
    x, y = batch()
    with torch.no_grad():
        assert torch.allclose(reference.eval()(x, y), net()(x, y), atol=1e-6)
    assert none is None
    with pytest.raises(EngineError, match="needs an optimizer"):
        reference.step()
    with pytest.raises(ConfigError, match="holds no parameter of the Net"):
        stranger = torch.optim.SGD(net().parameters(), lr=0.1)
        deepspeed.initialize(model=net(), optimizer=stranger, config=config)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_an_engine_is_made_of(run2, stage: int) -> None:
    run2(parts, stage)


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        deepspeed.initialize(config=BASE)
    with pytest.raises(ConfigError, match="no DeepSpeed configuration"):
        deepspeed.initialize(model=net())
    with pytest.raises(ConfigError, match="model or sequence parallelism"):
        deepspeed.initialize(model=net(), config=BASE, mpu=object())
    engine = begin(3, net())
    with pytest.raises(EngineError, match=r"takes a scalar loss\. For other outputs call their own backward"):
        engine.backward(torch.ones(2))
    with engine.no_sync(), pytest.raises(EngineError, match=r"inside engine.no_sync\(\): leave the context first"):
        engine.step()
    with pytest.raises(AttributeError, match=r"deepspeed.comm has no 'all_redcue' here"):
        deepspeed.comm.all_redcue


def test_an_engine_says_what_it_does_and_takes_other_sizes() -> None:
    settings = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    engine = begin(2, net(), bf16={"enabled": True}, **settings)
    assert engine.get_batch_info() == (8, 2, 4)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
    assert engine.gradient_accumulation_steps() == 4
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.set_train_micro_batch_size(4)
    assert engine.get_batch_info() == (12, 4, 3)
    with pytest.raises(ConfigError, match=r"train_batch_size 9 is not a multiple of micro-batch x ranks \(4 x 1\)"):
        engine.set_train_batch_size(9)
    assert (engine.gradient_clipping(), engine.zero_optimization_stage()) == (0.5, 2)
    assert engine.zero_optimization()
    assert engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)


def weights_file(folder: str) -> None:
    """Whole weights in the dtype of computing, of a model that is sharded."""
    model = net()
    model.head.bias.requires_grad_(False)
    engine = begin(3, model, bf16={"enabled": True})
    assert engine.save_16bit_model(folder, "model.bin", exclude_frozen_parameters=True)
    written = torch.load(f"{folder}/model.bin")
    expected = {name: value.bfloat16() for name, value in net().state_dict().items() if name != "head.bias"}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def consolidated(stage: int) -> None:
    """What scripts save by that know of ZeRO-3: on rank 0, in the dtype of computing."""
    model = net()
    model.head.bias.requires_grad_(False)
    engine = begin(stage, model, bf16={"enabled": True})
    for weights in (engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict(True)):
        assert (weights is None) == (dist.get_rank() != 0)
        for name, value in (weights or {}).items():
            assert torch.equal(value, net().state_dict()[name].bfloat16())
    if weights is not None:
        assert set(net().state_dict()) - set(weights) == {"head.bias"}


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_as_scripts_for_stage_3_ask_for_them(run2, stage: int) -> None:
    run2(consolidated, stage)


def test_weights_in_one_file(run2, tmp_path: Path) -> None:
    run2(weights_file, str(tmp_path))


def checkpoints(folder: str) -> None:
    """Tags, `latest`, what is loaded and what is left, another stage, and mistakes."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}}
    engine = begin(2, fp16=fp16, scheduler=schedule, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    assert engine.load_checkpoint(folder) == (None, None)
    for number in range(3):
        engine.backward(engine(*batch(number)))
        engine.step()
        engine.save_checkpoint(folder, tag="best" if number == 1 else None, client_state={"n": number})
    engine.empty_partition_cache()
    assert Path(folder, "latest").read_text() == "global_step3"
    assert sorted(p.name for p in Path(folder).iterdir()) == ["best", "global_step1", "global_step3", "latest"]

    other = begin(3, fp16=fp16, scheduler=schedule, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    path, state = other.load_checkpoint(folder)
    assert (Path(path).name, state) == ("global_step3", {"n": 2})
    assert (other.global_steps, other.global_samples) == (3, 12)
    assert (other.cur_scale, other.get_lr()) == (engine.cur_scale, engine.get_lr())
    for each in (engine, other):
        each.backward(each(*batch(7)))
        each.step()
    assert far(weights(engine.module), weights(other.module)) == 0.0
    assert other.get_lr() == engine.get_lr()

    fresh = begin(1, fp16=fp16)
    _, state = fresh.load_checkpoint(folder, tag="best", load_module_only=True)
    assert (state, fresh.global_steps, fresh.get_lr()) == ({"n": 1}, 0, [0.1])
    tag = f"of rank {dist.get_rank()}"
    with pytest.raises(ConfigError, match=r"must be the same on all ranks; they have 'of rank 0', 'of rank 1'"):
        engine.save_checkpoint(folder, tag=tag)
    with pytest.raises(ConfigError, match=r"save_checkpoint\(''\) has an empty folder"):
        engine.save_checkpoint("")
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(folder, tag="nowhere")
    with pytest.raises(ConfigError, match="load_module_strict"):
        engine.load_checkpoint(folder, load_module_strict=False)
    if dist.get_rank() == 0:
        Path(folder, "theirs").mkdir()
        Path(folder, "theirs", "mp_rank_00_model_states.pt").touch()
    dist.barrier()
    with pytest.raises(ConfigError, match=r"shardproof convert .*theirs OTHER_FOLDER/theirs"):
        engine.load_checkpoint(folder, tag="theirs")


def test_checkpoints(run2, tmp_path: Path) -> None:
    run2(checkpoints, str(tmp_path))


def compiled() -> float:
    """Compiled blocks, activations computed again, and an optimizer that scripts import by name."""
    torch._dynamo.reset()
    model = net()
    model.blocks[1].forward = functools.partial(deepspeed.checkpointing.checkpoint, model.blocks[1].forward)
    adam = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adam, config={"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    )
    assert optimizer.defaults["weight_decay"] == 0.0
    engine.compile(backend="aot_eager")
    engine.backward(engine(*batch()))
    norm = float(nn.utils.clip_grad_norm_(engine.module.parameters(), math.inf))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm)
    engine.destroy()
    plain = net()
    plain(*whole_batch()).backward()
    return abs(norm - float(nn.utils.clip_grad_norm_(plain.parameters(), math.inf)))


def test_compiled_and_checkpointed_blocks(run2) -> None:
    assert max(run2(compiled, timeout=180.0)) < 1e-6


def test_the_accelerator_is_torchs() -> None:
    accelerator = deepspeed.get_accelerator()
    device = default_device()
    assert accelerator.device_name() == device.type
    assert accelerator.current_device_name() == str(device)
    assert accelerator.communication_backend_name() == dist.get_default_backend_for_device(device)
    assert accelerator.current_device() == getattr(torch, device.type).current_device()


# --- fp16 and bf16 ---------------------------------------------------------------------------------------


def overflow(stage: int) -> tuple[list[float], list[bool], float]:
    """A loss that overflows on rank 0 alone: the scale falls and the step is skipped on all ranks."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine = begin(stage, fp16=fp16)
    scales, applied = [], []
    before = weights(engine.module)
    for number in range(5):
        x, y = batch(number)
        loss = engine(x, y)
        if number == 0 and dist.get_rank() == 0:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        if number == 0:
            assert far(weights(engine.module), before) == 0.0
        scales.append(engine.cur_scale)
        applied.append(engine.was_step_applied())
    assert (engine.skipped_steps, engine.global_steps) == (1, 5)
    return scales, applied, far(weights(engine.module), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_skips_what_overflows_on_any_rank(run2, stage: int) -> None:
    for scales, applied, moved in run2(overflow, stage):
        assert scales == [8, 8, 8, 16, 16]
        assert applied == [False, True, True, True, True]
        assert 0 < moved < 1


def low_precision(stage: int, section: dict[str, Any]) -> tuple[float, float]:
    """The distance to one process in float32 after four steps, and how far that one has come."""
    reference = net()
    start = weights(reference)
    engine = begin(stage, **section)
    assert all(p.dtype == engine.get_data_types()[0] for p in engine.module.parameters())
    for number in range(4):
        plain_step(reference, 1.0, rows=[whole_batch(number)])
        engine.backward(engine(*batch(number)))
        engine.step()
    masters = {n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    assert all(value.dtype == torch.float32 for value in masters.values())
    return far(masters, weights(reference)), far(start, weights(reference))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "section",
    [
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        {"fp16": {"enabled": True, "loss_scale": 64.0}},
        {"bf16": {"enabled": True}},
    ],
    ids=["fp16", "fp16-fixed", "bf16"],
)
def test_low_precision_stays_near_float32(run2, stage: int, section: dict[str, Any]) -> None:
    for error, moved in run2(low_precision, stage, section):
        assert error < 0.03 * moved


def bf16_overflow(check: bool) -> tuple[bool, bool]:
    """Whether a step with a gradient that is not finite is applied, and whether the weights are still finite."""
    engine = begin(2, bf16={"enabled": True, "check_grad_overflow": check})
    x, y = batch()
    engine.backward(engine(x, y) * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    assert not math.isfinite(engine.get_global_grad_norm())
    return engine.was_step_applied(), all(bool(w.isfinite().all()) for w in weights(engine.module).values())


@pytest.mark.parametrize("check", [True, False])
def test_bf16_checks_gradients_unless_told_not_to(run2, check: bool) -> None:
    for applied, finite in run2(bf16_overflow, check):
        assert (applied, finite) == (not check, check)


def without_a_batch() -> float:
    """Under fp16 rank 1 has no micro-batch: it steps all the same."""
    engine = begin(3, fp16={"enabled": True, "initial_scale_power": 4})
    if dist.get_rank() == 0:
        engine.backward(engine(*whole_batch()))
    engine.step()
    assert engine.was_step_applied()
    return far(weights(engine.module), {name: value.half() for name, value in net().state_dict().items()})


def test_a_rank_without_a_batch(run2) -> None:
    moved = run2(without_a_batch)
    assert moved[0] == moved[1] > 0


def autocast(stage: int, dtype: str) -> tuple[float, float, bool]:
    """Under torch.autocast weights stay float32; the distance to one process, how far that one has come, and whether
    the loss was scaled."""
    reference = net()
    start = weights(reference)
    section = {"enabled": True, "dtype": dtype}
    engine = begin(stage, torch_autocast=section, fp16={"enabled": False, "initial_scale_power": 8})
    for number in range(3):
        plain_step(reference, 1.0, rows=[whole_batch(number)])
        engine.backward(engine(*batch(number)))
        engine.step()
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    return far(weights(engine.module), weights(reference)), far(start, weights(reference)), engine.loss_scale_of.on


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (3, "bfloat16"), (3, "fp16")])
def test_autocast_stays_near_float32(run2, stage: int, dtype: str) -> None:
    for error, moved, scaled in run2(autocast, stage, dtype):
        assert 0 < error < 0.03 * moved
        assert scaled == (dtype == "fp16")


def direct_fp16() -> None:
    engine = begin(3, fp16={"enabled": True, "initial_scale_power": 8})
    with pytest.raises(EngineError, match=r"engine.scale\(loss\)"):
        engine(*batch()).backward()
    engine.scale(engine(*batch())).backward()
    engine.step()
    assert math.isfinite(engine.get_global_grad_norm())


def test_fp16_needs_a_scaled_loss(run2) -> None:
    run2(direct_fp16)


def test_the_scale_moves_as_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scales as DeepSpeed's own class, for a drawn sequence of overflows."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)
    generator = torch.Generator().manual_seed(1)
    for consecutive in (False, True):
        settings = Fp16(enabled=True, initial_scale_power=8, loss_scale_window=3, consecutive_hysteresis=consecutive)
        ours = LossScale(settings, torch.device("cpu"))
        other = theirs.DynamicLossScaler(256.0, 3, 1, 2, consecutive)
        for overflow in (torch.rand(200, generator=generator) < 0.2).tolist():
            ours._move(overflow)
            other.update_scale(overflow)
            assert ours.scale == other.cur_scale


def test_a_scale_goes_on_where_one_was_that_moved() -> None:
    """Of a run in bf16 a run in fp16 took the scale 1, at which small gradients are nought."""

    def scale(**settings: Any) -> LossScale:
        return LossScale(Fp16(**{"enabled": True, "initial_scale_power": 8, **settings}), torch.device("cpu"))

    moved = scale(hysteresis=1)
    moved.update(overflow=True)
    for saved, here, expected in (
        (moved, scale(), 128),
        (scale(enabled=False), scale(), 256),
        (scale(loss_scale=4), scale(), 256),
        (moved, scale(loss_scale=64), 64),
        (moved, scale(enabled=False), 1),
    ):
        here.load_state_dict(saved.state_dict())
        assert here.scale == expected
        assert float(here.apply(torch.ones(()))) == expected


def test_the_scale_has_an_end() -> None:
    ours = LossScale(Fp16(enabled=True, initial_scale_power=1, hysteresis=1), torch.device("cpu"))
    ours._move(True)
    with pytest.raises(NonFiniteError, match="smallest loss scale"):
        ours._move(True)


# --- what is said --------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    from shardproof.integrations.deepspeed import config

    config.say_once.cache_clear()
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5}
    with caplog.at_level(logging.WARNING, "shardproof"):
        for _ in range(2):
            begin(0, zero_optimization=zero)
    lines = [r.getMessage() for r in caplog.records if "no meaning" in r.getMessage()]
    assert lines == [
        "These keys of the DeepSpeed configuration have no meaning here and are not applied: "
        "zero_optimization.overlap_comm, "
        "zero_optimization.reduce_bucket_size."
    ]


def test_gradients_that_are_dropped_are_told(caplog: pytest.LogCaptureFixture) -> None:
    from shardproof.integrations.deepspeed import config

    config.say_once.cache_clear()
    engine = begin(0, gradient_accumulation_steps=2)
    engine.zero_grad()
    engine.backward(engine(*batch()))
    assert "drops" not in caplog.text
    engine.zero_grad()
    assert "drops the gradients so far" in caplog.text
    assert all(p.grad is None for p in engine.module.parameters())


def test_steps_are_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    engine = begin(0, steps_per_print=2)
    for number in range(4):
        engine.backward(engine(*batch(number)))
        engine.step()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step={n}, skipped=0, lr=[0.1], mom=[0]" for n in (2, 4)]
