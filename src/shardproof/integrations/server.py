"""Weights of a sharded model for vLLM to generate with: TRL passes them on, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardproof
from shardproof.errors import ConfigError
from shardproof.integrations.saved import adapters_of, state_dict_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def serve_weights(generation: Any, model: nn.Module, is_sharded: Any) -> None:
    """Make TRL's `VLLMGeneration` take its weights from us, once the model is sharded.

    Its own method reads parameter after parameter on every rank, and merges adapters into the model and out again,
    which leaves rounding errors. A method of the object is replaced, as on the trainer's accelerator.

    Raises:
        ConfigError: vLLM cannot hold the model with merged adapters.
    """
    _refuse_adapters_of_tied(model)
    theirs, everywhere = generation._iter_named_params, generation.mode != "server"

    def iter_named_params() -> Iterator[tuple[str, torch.Tensor]]:
        return whole_weights(model, generation.accelerator, everywhere) if is_sharded(model) else theirs()

    generation._iter_named_params = iter_named_params


def asks_all_ranks(trainer: Any) -> bool:
    """Whether the trainer's next request to vLLM involves all ranks: to gather weights for it, or prompts.

    A vLLM in this process answers any number of requests of its rank, once it has the weights of a step.
    """
    if not getattr(trainer, "use_vllm", False):
        return False
    generation = trainer.vllm_generation
    if generation.mode == "server" or generation.tensor_parallel_size > 1 or generation._llm_weights_sleeping:
        return True
    return bool(trainer._last_loaded_step != trainer.state.global_step)


def _refuse_adapters_of_tied(model: nn.Module) -> None:
    """Adapters on one of several modules that share a weight would give that module a different weight; vLLM has only
    one."""
    if not adapters_of(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    places: dict[int, list[str]] = {}
    adapted = set()
    for name, module in model.named_modules():
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        weight = base._parameters.get("weight")
        if weight is not None and not name.endswith(".base_layer"):
            places.setdefault(id(weight), []).append(name)
        if isinstance(module, BaseTunerLayer):
            adapted.add(name)
    shared = next((names for names in places.values() if len(names) > 1 and adapted & set(names)), None)
    if shared is not None:
        names = [name.removeprefix("base_model.model.") for name in shared]
        raise ConfigError(
            f"vLLM has one weight for {' and '.join(names)}, which this model shares: adapters on one of them would "
            "change both there. Remove it from --target-modules, or generate without vLLM."
        )


def whole_weights(
    model: nn.Module, accelerator: Accelerator, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight as in the model's files, in the shape and under the name that vLLM reads, with adapters merged.

    Collective: every rank iterates to the end. Rank 0 gets the weights, on the device and in the dtype of their
    masters; the others get nothing, unless `everywhere`. The weights are copies, of one unit at a time; the model is
    not changed.
    """
    units: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        flat = getattr(parameter, "flat", None)  # a parameter of a special class is unsharded
        units.setdefault(flat.unit.index if flat is not None else -1, []).append(name)
    for names in units.values():
        with state_dict_of(model, set(names)):
            values = shardproof.full_state_dict(model, rank0_only=not everywhere)
        values = {name: value.to(accelerator.device) for name, value in values.items()}
        with torch.no_grad():
            _merge_adapters(model, values)
        named = {served: value for name, value in values.items() if (served := _served_name(model, name)) is not None}
        values = _as_in_files(model, named)
        del named
        while values:
            name = next(iter(values))
            yield name, values.pop(name)


def _served_name(model: nn.Module, name: str) -> str | None:
    """The name of a weight in the model without adapters; None for a weight of an adapter."""
    if not (adapters := adapters_of(model)):
        return name
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    name = name.replace(f".modules_to_save.{adapters[0]}.", ".")
    others = (str(model.prefix), ".original_module.", ".modules_to_save.")  # the last one for a reference's
    return None if any(other in name for other in others) else name


def _as_in_files(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert weights whose names or layout in the model (experts in one tensor) differ from its files: vLLM knows the
    names in files, but not all of transformers' own."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    base: Any = model.get_base_model() if adapters_of(model) else model  # type: ignore[operator]
    return revert_weight_conversion(base, values) if isinstance(base, PreTrainedModel) else values


def _merge_adapters(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Let PEFT merge into `values`, which take the places of the parameters meanwhile."""
    if not adapters_of(model) or not values:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for place, module in model.named_modules():
        prefix = f"{place}."
        if isinstance(module, BaseTunerLayer) and any(name.startswith(prefix) for name in values):
            here = {f"layer.{name.removeprefix(prefix)}": v for name, v in values.items() if name.startswith(prefix)}
            before = list(module.merged_adapters)
            torch.func.functional_call(_Merge(module), here, ())
            module.merged_adapters[:] = before


class _Merge(nn.Module):
    """A PEFT layer's `merge` as a forward pass, which torch.func can run on other values."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> None:
        self.layer.merge()
