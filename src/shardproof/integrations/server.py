"""Weights of a sharded model for a vLLM, which generates with them: TRL hands them over, one unit at a time."""

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
    """Have this `VLLMGeneration` of TRL's take its weights from us, once the model is sharded.

    Its own way reads parameter after parameter on every rank, and merges adapters into the model and out of it again,
    which leaves what rounding took. A method of the object is replaced, as on the trainer's accelerator.

    Raises:
        ConfigError: vLLM cannot hold what adapters make of the model.
    """
    _refuse_adapters_of_tied(model)
    theirs, everywhere = generation._iter_named_params, generation.mode != "server"

    def iter_named_params() -> Iterator[tuple[str, torch.Tensor]]:
        return whole_weights(model, generation.accelerator, everywhere) if is_sharded(model) else theirs()

    generation._iter_named_params = iter_named_params


def asks_all_ranks(trainer: Any) -> bool:
    """Whether what this trainer's rank asks a vLLM next is asked by all ranks: weights are gathered for it, or prompts.

    A vLLM of this process alone answers as often as its rank likes, once it has the weights of a step.
    """
    if not getattr(trainer, "use_vllm", False):
        return False
    generation = trainer.vllm_generation
    if generation.mode == "server" or generation.tensor_parallel_size > 1 or generation._llm_weights_sleeping:
        return True
    return bool(trainer._last_loaded_step != trainer.state.global_step)


def _refuse_adapters_of_tied(model: nn.Module) -> None:
    """Adapters of one place make another weight of it than of the other places that share it; vLLM has one."""
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
            f"vLLM has one weight for {' and '.join(names)}, which this model shares: adapters of one of them"
            " would change both there. Take it out of --target-modules, or generate without vLLM."
        )


def whole_weights(
    model: nn.Module, accelerator: Accelerator, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight as the model's files have it, in the shape and under the name that vLLM reads; adapters are merged
    into what is given.

    Collective: every rank goes to the end. Rank 0 gets the weights, on the device and in the dtype of their masters;
    the others get nothing, unless `everywhere`. What is given is a copy, and of one unit at a time; the model is left
    as it is.
    """
    units: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        flat = getattr(parameter, "flat", None)  # a parameter of a special class is whole on every rank
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
    """The name of a weight in the model without adapters; None for one that is of an adapter only."""
    if not (adapters := adapters_of(model)):
        return name
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    name = name.replace(f".modules_to_save.{adapters[0]}.", ".")
    others = (str(model.prefix), ".original_module.", ".modules_to_save.")  # the last one of a reference's
    return None if any(other in name for other in others) else name


def _as_in_files(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model holds under other names than its files, and put together (experts in one tensor), as it is there:
    vLLM knows the names of files, and not all of transformers' own."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    base: Any = model.get_base_model() if adapters_of(model) else model  # type: ignore[operator]
    return revert_weight_conversion(base, values) if isinstance(base, PreTrainedModel) else values


def _merge_adapters(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Let PEFT merge into `values`, which lie in the places of the parameters for that long."""
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
    """`merge` of a layer of PEFT's as a forward pass, which torch.func runs on other values."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> None:
        self.layer.merge()
