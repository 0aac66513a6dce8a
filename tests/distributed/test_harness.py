"""The reference harness is right about right engines and notices wrong ones."""

from __future__ import annotations

import pytest

from distributed.harness import Alone, Averaged, compare, parity, reference, train
from zero.graphs import CASES

# cases that a plain all-reduce before the step cannot serve: they step or read gradients by themselves, or add
# parameters of another model to the optimizer
NEEDS_AN_ENGINE = {
    "a_trained_deepcopy",
    "a_trained_deepcopy_of_a_submodule",
    "autograd_grad_of_parameters_used_as_gradients",
    "gradient_scaler",
    "gradients_edited_before_the_step",
    "gradients_kept_and_put_back",
    "gradients_read_between_two_backwards",
    "optimizer_step_with_closure",
    "optimizer_steps_in_backward_by_hooks",
    "penalty_on_the_gradient_of_a_block_weight",
    "penalty_on_the_gradient_of_all_parameters",
    "penalty_on_the_gradient_of_the_head_weight",
    "sharpness_aware_minimisation",
    "two_optimizers_on_one_model",
    "zero_grad_to_zeros",
}


def averaged(names: list[str], scale: float = 1.0) -> dict[str, str]:
    wrong = {}
    for name in names:
        try:
            parity(name, CASES[name], Averaged(scale))
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


def test_the_reference_repeats_itself_bit_for_bit():
    for name in ("plain", "edit_by_nn_init", "tied_embedding_and_head"):
        compare(train(CASES[name], Alone()), reference(name, CASES[name]), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_averaged_gradients_equal_the_whole_batch_in_every_case(run, world):
    """So a difference in a test of the engine is the engine's."""
    names = [name for name in CASES if name not in NEEDS_AN_ENGINE]
    for wrong in run(world, averaged, names, timeout=120):
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_a_wrong_engine_is_noticed(run2):
    for wrong in run2(averaged, ["plain", "accumulation", "frozen_mixture"], 1.01):
        assert set(wrong) == {"plain", "accumulation", "frozen_mixture"}
