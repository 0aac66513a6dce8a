"""--lisa-activated-layers: some layers are trained at a time, the same on one process and on many."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.train.adapters.adding import check_named_parts
from shardproof.train.checks.contradictions import check_together
from shardproof.train.options.config import SftConfig
from train.stages_for_tests import PLAN

LISA = ["--lisa-activated-layers", "1", "--lisa-step-interval", "2", "--weight-decay", "0.1"]


@pytest.fixture(scope="module")
def runs(commands, sft):
    done = commands([(name, sft(*LISA, *more)) for name, more in PLAN.items()])
    last = done["stage 3"].folder
    resumed = sft(*LISA, *PLAN["stage 3"], "--resume", str(last / "checkpoint-3"))
    return done | commands([("resumed", resumed), ("first", sft(*LISA, "--max-steps", "2"))])


@pytest.mark.slow
def test_the_numbers_of_one_process_at_every_stage(runs) -> None:
    one = runs["one"]
    for name in PLAN:
        assert runs[name].code == 0, runs[name].output
        for key in ("loss", "grad_norm"):
            assert runs[name].series(key) == pytest.approx(one.series(key), rel=1e-4), f"{key}: {name}"
    assert one.series("loss")[-1] < one.series("loss")[0]


@pytest.mark.slow
def test_a_run_that_goes_on_in_the_middle_of_a_turn_is_the_same_to_the_bit(runs) -> None:
    assert runs["resumed"].code == 0, runs["resumed"].output
    assert runs["resumed"].series("loss") == runs["stage 3"].series("loss")[3:]


@pytest.mark.slow
def test_only_the_layer_whose_turn_it_is_has_changed(runs, tiny: Path) -> None:
    assert runs["first"].code == 0, runs["first"].output
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, runs["first"].folder / "model"))
    changed = {name.split(".layers.")[-1][:1] for name in before if not before[name].equal(after[name])}
    assert len(changed & {*"0123456789"}) == 1
    assert any("embed" in name and not before[name].equal(after[name]) for name in before)


def test_as_many_layers_as_there_are_is_no_choice(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lisa-activated-layers 9: the language model of \w+ has \d+ layer"):
        check_named_parts(str(tiny), SftConfig(model=str(tiny), dataset=["x"], lisa_activated_layers=9))


def test_layers_that_are_frozen_have_no_turn(tiny: Path) -> None:
    config = SftConfig(model=str(tiny), dataset=["x"], freeze_parameters=["layers.[01]"], lisa_activated_layers=2)
    with pytest.raises(ConfigError, match=r"has \d+ layer\(s\) to train"):
        check_named_parts(str(tiny), config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lisa_activated_layers": 1, "tuner": "lora"}, "--lisa-activated-layers needs --tuner full"),
        ({"lisa_step_interval": 5}, "--lisa-step-interval needs --lisa-activated-layers"),
    ],
)
def test_what_means_nothing_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_together(SftConfig(model="x", dataset=["x"], **options))
