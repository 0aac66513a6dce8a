"""The memory of an `rlhf` run besides the trained model: models that are not trained, a value model, answers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from shardproof.doctor.config import PlanConfig, RlhfDoctorConfig
from shardproof.doctor.planning.blocks import keep_blocks, repeated_blocks
from shardproof.doctor.planning.imagine import Rank
from shardproof.doctor.planning.profiles import line
from shardproof.doctor.planning.stand_ins import autocast_off_on_meta, fake_group
from shardproof.doctor.planning.subject import OF_MODEL, as_held, meta_model
from shardproof.models.families.family import CAUSAL
from shardproof.models.scorers import SCORER, VALUER
from shardproof.train.options.rlhf_config import REFERRED

FROZEN = "models that are not trained"


def beside(config: RlhfDoctorConfig, asked: PlanConfig, source: str) -> dict[str, float]:
    """The bytes that a process holds, by purpose. `asked`: the plan of the trained model."""
    from shardproof.doctor.planning.plan import make_plan

    found: dict[str, float] = {}
    fields = PlanConfig.model_fields
    alone = {name: fields[name].get_default(call_default_factory=True) for name in (*OF_MODEL, "sequence_parallel")}
    whole = asked.model_copy(update=alone)
    for model, kind, stage, precision, offload in asked_only(config, source):
        place = (offload or asked.offload[0]).partition(":")[0]
        place = "none" if asked.device == "cpu" and place != "nvme" else place  # as for the trained model
        other = whole.model_copy(update={"model": model, "precision": precision, "offload": [place]})
        found[FROZEN] = found.get(FROZEN, 0.0) + kept_by(other, kind, stage)
    if config.rlhf_type == "ppo":
        how: dict[str, Any] = {
            "stage": str(config.model_stages.get("value_model", config.stage)),
            "precision": config.model_precisions.get("value_model", config.precision),
        }
        if place := config.model_offloads.get("value_model", "").partition(":")[0]:
            how["offload"] = ["none" if asked.device == "cpu" and place != "nvme" else place]
        value = whole.model_copy(update={"model": config.value_model or source, **how})
        found["the value model"] = make_plan(value, VALUER, "scores").candidates[0].peak
    if config.use_vllm and config.vllm_mode == "colocate" and not config.vllm_sleep:
        found["vLLM"] = config.vllm_gpu_memory_utilization * asked.gpu_memory * 1e9
    return found


def kept_by(config: PlanConfig, auto: str, stage: int) -> float:
    """The bytes of a model that is never trained, between its forward passes."""

    def live(rank: Rank) -> float:
        rank.ask(1, 16)
        return rank.ledger.here()

    return _at_full_depth(as_held(meta_model(config, auto).requires_grad_(False), config), config, stage, live)


def while_writing(config: PlanConfig, rows: int, prompt: int) -> float:
    """The peak memory of the trained model in a process that generates `rows` answers at once to prompts of `prompt`
    tokens, including the optimizer state and the attention cache. Whole parameters may be held besides, as far as
    memory is free (`inference_memory`)."""

    def most(rank: Rank) -> float:
        rank.step(1, 16)
        return max(rank.ask(rows, prompt, cache=True)[0], rank.ask(rows, config.max_length[0], cache=True)[1])

    return _at_full_depth(meta_model(config), config, int(config.stage), most)


def _at_full_depth(model: Any, config: PlanConfig, stage: int, measure: Callable[[Rank], float]) -> float:
    """A measurement at full depth, extrapolated from a few blocks."""
    blocks, offload = repeated_blocks(model), config.offload[0]
    elsewhere = "all" if offload == "nvme" else offload  # the same data is offloaded, to another place
    few = [2, 3] if blocks.groups > 3 else [blocks.groups]
    found = []
    for groups in few:
        with fake_group(config.shard_group or config.gpus[0]), autocast_off_on_meta():  # the number of ranks per copy
            part = keep_blocks(deepcopy(model), blocks.name, blocks.of(int(groups)) if len(few) > 1 else blocks.number)
            found.append(measure(Rank(part, config, stage, blocks, elsewhere)))
    return sum(share * found[few.index(groups)] for groups, share in line(few, blocks.groups))


def asked_only(config: RlhfDoctorConfig, source: str) -> list[tuple[str, str, int, str, str | None]]:
    """The models that are never trained, with the class that loads each, its stage, its precision, and its own offload,
    if any."""

    def of(source: str, auto: str, name: str) -> tuple[str, str, int, str, str | None]:
        stage = config.stage if config.frozen_stage is None else config.frozen_stage
        precision = config.frozen_precision or config.precision
        stage, precision = config.model_stages.get(name, stage), config.model_precisions.get(name, precision)
        return (source, auto, stage, precision, config.model_offloads.get(name))

    kind, found = config.rlhf_type, []
    compares = kind in REFERRED and config.beta != 0 and not (kind == "grpo" and config.beta is None)
    if config.ref_model or (compares and config.tuner == "full" and not config.precompute_ref):
        found.append(of(config.ref_model or source, CAUSAL, "ref_model"))
    if config.teacher_model:
        found.append(of(config.teacher_model, CAUSAL, "teacher_model"))
    return found + [of(judge, SCORER, "reward_model") for judge in config.reward_model]
