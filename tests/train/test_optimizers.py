"""AdamW in eight bits, and in bf16 with updates rounded by chance, on slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import aside
import shardproof
from shardproof.errors import CheckpointError, ConfigError
from shardproof.train.optim.optimizers import AdamWBf16, adafactor, adamw_8bit, made_by, noise_of, rounded
from zero.models import Net

CPU = torch.device("cpu")


def test_an_optimizer_that_computes_the_loss_by_itself_is_refused():
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))]}]

    def lbfgs(groups: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(groups[0]["params"], lr=lr)

    with pytest.raises(ConfigError, match="a step of LBFGS needs a closure that recomputes the loss"):
        made_by(lbfgs, groups, 0.1, None)
    for make in (adafactor, torch.optim.SGD, AdamWBf16):
        assert made_by(make, groups, 0.1, None).param_groups[0]["lr"] == 0.1


# --- rounding by chance ---------------------------------------------------------------------------


def test_a_value_becomes_one_of_its_neighbours_and_is_right_in_the_mean():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)
    draws = 4096
    noise = (noise_of(0, 64 * draws, salt=5, device=CPU) & 0xFFFF).view(draws, 64)
    found = rounded(values.expand(draws, 64).contiguous(), noise).float()
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((found == down) | (found == up)).all()
    step = (up - down).abs()
    error = (found.mean(0) - values).abs() / step
    assert error.max() < 4.5 * 0.5 / draws**0.5  # four and a half deviations of the mean, if that is 1/2 of a step
    assert 0.2 < (found == up).float().mean() < 0.8


def test_what_is_exact_stays_and_what_is_not_finite_too():
    exact = torch.tensor([0.0, 1.0, -2.5, float("inf"), float("-inf")])
    for noise in (0, 65535):
        assert torch.equal(rounded(exact, torch.full((5,), noise)).float(), exact)
    assert rounded(
        torch.tensor([float("nan")]).view(torch.int32).fill_(-1).view(torch.float32), torch.tensor([65535])
    ).isnan()


def test_noise_belongs_to_the_element_and_its_bits_are_even():
    whole = noise_of(0, 1000, salt=3, device=CPU)
    assert torch.equal(torch.cat([noise_of(0, 17, 3, CPU), noise_of(17, 983, 3, CPU)]), whole)
    assert not torch.equal(noise_of(0, 1000, 4, CPU), whole)
    many = noise_of(0, 1 << 16, salt=7, device=CPU)
    for bit in range(48):
        assert abs(((many >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / 256
    parts = [((many >> shift) & 0xFFFF).double() for shift in (0, 16, 32)]
    assert torch.corrcoef(torch.stack(parts)).fill_diagonal_(0).abs().max() < 5 / 256


def descended(optimizer: Any, start: torch.Tensor, **more: Any) -> torch.Tensor:
    """500 steps of 4e-5 each, where bf16 cannot tell 1 from 0.998: a gradient of one sign."""
    p = nn.Parameter(start.clone())
    optimizer = optimizer([p], lr=4e-5, weight_decay=0.0, **more)
    for _ in range(500):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p.detach().float()


def test_updates_below_the_last_bit_add_up():
    start = torch.ones(256)
    exact = descended(torch.optim.AdamW, start)
    plain = descended(torch.optim.AdamW, start.bfloat16(), fused=False, foreach=False)
    ours = descended(AdamWBf16, start.bfloat16(), seed=1)
    assert (exact - 0.98).abs().max() < 1e-3
    assert plain.eq(1.0).all()  # each is rounded away
    assert abs(ours.mean() - exact.mean()) < 2e-3
    assert ours.std() > 0


def test_in_fp32_it_is_torchs_adamw():
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}
    optimizers = [torch.optim.AdamW(models[0].parameters(), **options), AdamWBf16(models[1].parameters(), **options)]
    for k in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.full((2, 6), float(k))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def kinds() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "channels_last": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 5).t(),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "turned_complex": torch.randn(3, 2, dtype=torch.complex64).t(),
        "double": torch.randn(7, dtype=torch.float64),
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
    }


@pytest.mark.parametrize("kind", kinds())
def test_so_it_is_for_elements_in_another_order_and_of_other_dtypes(kind: str):
    params = [nn.Parameter(kinds()[kind]) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    optimizers = [torch.optim.AdamW(params[:1], **options), AdamWBf16(params[1:], **options)]
    gradients = [torch.randn_like(params[0]).contiguous() for _ in range(3)]
    for grad in gradients:
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = grad.clone()
            optimizer.step()
    close = 1e-14 if kind == "double" else 1e-6
    assert torch.allclose(*params, atol=close, rtol=0)
    assert not params[0].numel() or not torch.equal(params[1], kinds()[kind])


def test_in_bf16_elements_in_another_order_get_the_same_bits():
    start = kinds()["channels_last"].bfloat16()
    params = [nn.Parameter(start), nn.Parameter(start.contiguous())]
    for p in params:
        optimizer = bf16([p])
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(*params)


def trained(
    stage: int, optimizer: Any, steps: int = 4, load: str = "", save: str = "", **options: Any
) -> dict[str, Any]:
    """Weights after some steps on twelve rows, each a backward pass of its own, dealt out in turn to the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Net().to(options.pop("dtype", torch.float32))
    model = shardproof.shard(model, stage, gradient_divide_factor=1, **options)
    optimizer = optimizer(model.parameters())
    first = 0
    if load:
        first = shardproof.load(model, optimizer, load)["steps"]
    dtype = next(model.parameters()).dtype
    for k in range(first, steps):
        chance = torch.Generator().manual_seed(k)
        x, y = (torch.randn(12, 1, n, generator=chance).to(dtype) for n in (6, 3))
        for j in range(rank, 12, world):
            with shardproof.no_sync(model):
                (mse_loss(model(x[j]), y[j], reduction="sum") / 36).backward()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        shardproof.save(model, optimizer, save, asynchronous=False, steps=steps)
    return shardproof.full_state_dict(model, rank0_only=False)


def bf16(params: Any) -> AdamWBf16:
    return AdamWBf16(params, lr=1e-3, seed=3)


PURE = {"dtype": torch.bfloat16, "deterministic": True}


def same(weights: dict[str, Any], got: dict[str, Any]) -> bool:
    return all(torch.equal(got[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        (2, 0),
        (2, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1), (2, 2), (3, 3), (4, 2), (4, 3)]),
    ],
)
def test_the_same_bits_on_any_number_of_ranks_and_at_any_stage(run, world, stage):
    weights = trained(0, bf16, **PURE)
    assert all(value.dtype == torch.bfloat16 for value in weights.values())
    assert all(same(weights, got) for got in run(world, trained, stage, bf16, **PURE))


def test_a_checkpoint_goes_on_with_the_same_bits_elsewhere(run2, tmp_path):
    folder = str(tmp_path / "checkpoint-2")
    weights = trained(0, bf16, **PURE)
    run2(trained, 3, bf16, steps=2, save=folder, **PURE)
    assert same(weights, trained(1, bf16, load=folder, **PURE))


# --- state in eight bits --------------------------------------------------------------------------


def eight(params: Any) -> torch.optim.Optimizer:
    aside.bitsandbytes()
    return adamw_8bit(params, smallest=16, lr=1e-3, eps=1e-4)


def states(stage: int) -> dict[str, tuple[str, int]]:
    torch.manual_seed(0)
    model = shardproof.shard(Net(), stage)
    optimizer = eight(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    kinds = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        if "state1" in state:
            kinds[name] = str(state["state1"].dtype), p.numel()
    return kinds


def test_eight_bits_come_near_to_fp32_and_are_eight_bits(bitsandbytes, run2):
    for kinds in run2(states, 3):
        assert {dtype for dtype, size in kinds.values() if size >= 16} == {"torch.uint8"}
        assert {dtype for dtype, size in kinds.values() if size < 16} <= {"torch.float32"}
    exact = trained(0, lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4))
    begun = trained(0, eight, steps=0)
    for stage in (0, 3):
        got = run2(trained, stage, eight)[0]
        for name, value in exact.items():
            moved = (value - begun[name]).norm()
            assert (got[name] - value).norm() < 0.15 * moved + 1e-6, name


def test_a_checkpoint_of_eight_bits_goes_on_as_it_was_and_is_not_cut_anew(bitsandbytes, run2, tmp_path):
    folder = str(tmp_path / "checkpoint-2")
    weights = run2(trained, 3, eight)[0]
    run2(trained, 3, eight, steps=2, save=folder)
    assert same(weights, run2(trained, 3, eight, load=folder)[0])
    with pytest.raises(CheckpointError, match="cannot be resharded"):
        trained(0, eight, load=folder)
    text = "checkpoint-2 is AdamW8bitOfSlices, and this one is AdamWBf16, which keeps different state"
    with pytest.raises(CheckpointError, match=text):
        trained(0, bf16, load=folder)


@pytest.mark.slow
def test_both_as_options_of_a_run(bitsandbytes, commands, sft):
    rounding = ["--precision", "bf16", "--stochastic-rounding"]
    more = ["--save-steps", "3", "--max-steps", "6", "--nproc", "2"]
    done = commands(
        [
            ("fp32", sft("--stage", "3", "--max-steps", "6", "--nproc", "2")),
            ("eight", sft("--stage", "3", "--optimizer", "adamw_8bit", *more)),
            (
                "eight again",
                sft("--stage", "3", "--optimizer", "adamw_8bit", *more, "--resume", "RUNS/eight/checkpoint-3"),
            ),
            ("rounded", sft("--stage", "3", *rounding, *more)),
            ("rounded again", sft("--stage", "0", *rounding, *more, "--resume", "RUNS/rounded/checkpoint-3")),
            ("rounded alone", sft("--stage", "0", *rounding, "--max-steps", "6", "--nproc", "1")),
        ]
    )
    assert all(run.code == 0 for run in done.values()), [run.output for run in done.values()]
    losses = {name: run.series("loss") for name, run in done.items()}
    assert losses["eight again"] == losses["eight"][3:]
    assert losses["eight"] == pytest.approx(losses["fp32"], abs=0.02)
    assert losses["rounded again"] == pytest.approx(losses["rounded"][3:], abs=0.01)
    for name in ("rounded", "rounded alone"):
        assert losses[name] == pytest.approx(losses["fp32"], abs=0.1)
