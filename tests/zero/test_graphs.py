"""Promise: any graph trains alike on one process and on many, at every stage (fp32: 1e-6; one rank: bit for bit)."""

from __future__ import annotations

import pytest

from distributed.harness import Sharded, parity
from shardproof.zero import autograd
from shardproof.zero.comm.collectives import Collectives
from shardproof.zero.ranks.invariants import Invariants
from zero.graphs import CASES

STAGES = [0, 1, 2, 3]

# What the engine does not keep yet, with the reason. An entry that passes fails the suite: then it goes.
OPEN: dict[str, str] = {}

# For four ranks: one case of each kind, among them those whose parameters are smaller than four slices.
ON_FOUR = [
    "plain",
    "dummy_zero_loss_over_an_unused_adapter",
    "l2_regulariser_over_all_parameters",
    "parameters_mixed_with_plain_tensors_outside",
    "checkpoint_inside_a_block_used_twice_reentrant",
    "checkpoint_of_a_block_used_twice_nonreentrant",
    "tied_embedding_and_head",
    "weights_tied_across_units",
    "backward_in_eval_mode_with_no_grad_passes_between",
    "inference_mode_before_the_first_step_and_between",
    "frozen_and_unfrozen_between_steps",
    "two_forwards_two_backwards_in_reverse",
    "two_backwards_with_retain_graph",
    "accumulation_with_no_sync",
    "micro_batches_use_different_modules",
    "a_parameter_used_only_now_and_then",
    "half_and_integer_parameters_buffers_scalars",
    "torch_transformer_layers",
    "lstm_and_gru",
    "a_module_attached_between_steps",
    "penalty_on_the_gradient_of_all_parameters",
    "two_trained_models_in_one_graph",
    "a_trained_deepcopy",
    "forward_returns_closure",
    "exception_in_backward_then_a_clean_retry",
    "blocks_in_changing_order",
    "edit_by_nn_init",
    "edit_by_masks_and_foreach",
    "ema_by_lerp",
    "edit_through_whole_with_writeback",
    "optimizer_adamw_fused",
    "optimizer_sgd_momentum",
]
# The harness runs these on every stage on four ranks; the rest of the list at stage 3.
ON_FOUR_AT_EVERY_STAGE = ON_FOUR[:4]


def check(name: str, stage: int) -> None:
    parity(name, CASES[name], Sharded(stage))


def cases(names: list[str], stages: list[int]) -> list[object]:
    """Every name at every stage, in an order that lets a rank reuse its reference."""
    found = []
    for name in names:
        for stage in stages:
            marks = [pytest.mark.xfail(reason=OPEN[name], strict=True)] if name in OPEN else []
            found.append(pytest.param(name, stage, marks=marks))
    return found


# On one rank stages differ only in when gradients are taken over: at stage 1 at the end of backward.
@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", cases(list(CASES), [3]))
def test_one_rank_without_a_group_is_bit_equal_to_plain_torch(name, stage):
    check(name, stage)


# Then torch saves weights as it does without an engine; these runs are too short to get there.
@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", cases(list(CASES), [3]))
def test_so_it_is_behind_the_first_steps(monkeypatch, name, stage):
    monkeypatch.setattr(Invariants, "early", False)
    check(name, stage)


class Never:
    """`by_hand` is False while this stands in the class, and what it was made as afterwards."""

    def __get__(self, holder: object, kind: type) -> bool:
        return False

    def __set__(self, holder: object, value: bool) -> None:
        vars(holder)["by_hand"] = value


def check_behind_the_first_steps(name: str, stage: int, by_hand: bool) -> None:
    """`by_hand`: as on CPUs. On accelerators data moves without us."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Invariants, "early", False)
        if not by_hand:
            patch.setattr(Collectives, "by_hand", Never(), raising=False)
        check(name, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name, stage", cases(ON_FOUR, [1]))
def test_so_it_is_on_two_ranks_that_keep_what_they_gathered(run2, name, stage, by_hand):
    run2(check_behind_the_first_steps, name, stage, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "name, stage", cases([name for name in CASES if name not in ON_FOUR], [0, 1, 2]) + cases(ON_FOUR, [0, 2])
)
def test_so_it_is_in_the_other_cases_and_stages(run2, name, stage, by_hand):
    run2(check_behind_the_first_steps, name, stage, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("name, stage", cases(list(CASES), [0, 1, 2]))
def test_one_rank_without_a_group_is_bit_equal_at_the_other_stages_too(name, stage):
    check(name, stage)


@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", cases(list(CASES), [3]) + cases(ON_FOUR, [0, 1, 2]))
def test_two_ranks_equal_one_process(run2, name, stage):
    run2(check, name, stage)


def check_each_with_a_node_of_its_own(name: str, stage: int) -> None:
    """As parameters have that are larger than those of these models."""
    small, autograd.SMALL = autograd.SMALL, 0
    try:
        check(name, stage)
    finally:
        autograd.SMALL = small


@pytest.mark.sampled
@pytest.mark.parametrize("name, stage", cases([*ON_FOUR, "backward_to_one_parameter_of_a_block"], [3]))
def test_so_they_do_where_parameters_are_large(run2, name, stage):
    check_each_with_a_node_of_its_own(name, stage)
    run2(check_each_with_a_node_of_its_own, name, stage)


# Stage 2 reduces as stage 3 does and gathers as stage 1; this does at the end of backward what that does in its middle.
@pytest.mark.slow
@pytest.mark.parametrize("name, stage", cases([name for name in CASES if name not in ON_FOUR], [0, 1, 2]))
def test_two_ranks_equal_one_process_in_the_other_cases_at_the_other_stages(run2, name, stage):
    run2(check, name, stage)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name, stage",
    cases(ON_FOUR_AT_EVERY_STAGE, STAGES) + cases(ON_FOUR[4:], [3]),
)
def test_four_ranks_equal_one_process(run4, name, stage):
    run4(check, name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("name, stage", cases(list(CASES), STAGES))
def test_four_ranks_equal_one_process_in_every_case(run4, name, stage):
    run4(check, name, stage)
