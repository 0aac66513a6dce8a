"""Which weights of a model are packed, and their names in its files.

[Note: what stays whole] The linear layers in the blocks of the language model are packed, and so are experts: together
they are nearly all of its weights. As in published packed models, the embedding, the head (for vocabulary, labels or
scores), towers and their projections, routers, and the layers of recurrent mixers (which kernels read in a form of
their own) stay unpacked: they are small, and either errors in them do much harm, or nothing can compute with them
packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy
from shardproof.train.options.patterns import check_pattern
from shardproof.train.packing.kinds import Packing
from shardproof.zero.build import find_units

if TYPE_CHECKING:
    from torch import Tensor, nn

WHOLE = re.compile(r"(^|\.)((\w+_)?(router|gate)|linear_attn|mamba|ssm|temporal_block)(\.|$)")
NUMBERED = re.compile(r"\.\d+(\.|$)")
SHOWN = 3
SIZES = (128, 64, 32, 16)  # group sizes that kernels support
SAMPLED = 8  # columns of a weight that are compared after reloading


@dataclass
class Places:
    """The weights to pack.

    Attributes:
        blocks: the names of the blocks that contain them.
        layers: for each packed parameter (of a linear layer, or of all experts of a layer), the names of its linear
            layers in the files, and the lengths of their rows.
        ignored: the linear layers that are not packed, as name patterns for compressed-tensors.
        skipped: the same for bitsandbytes: names of modules in the model, with one name for a module that has only such
            layers.
        samples: some columns of each weight, from before packing.
    """

    blocks: list[str]
    layers: dict[str, dict[str, int]]
    ignored: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    samples: dict[str, Tensor] = field(default_factory=dict)

    @property
    def packed(self) -> set[str]:
        """The names of the linear layers in the files."""
        return {name for names in self.layers.values() for name in names}


def places_in(model: Any, packing: Packing) -> Places:
    """The weights to pack in a model without adapters.

    Raises:
        ConfigError: there is nothing to pack, or something cannot be packed in this kind.
    """
    for pattern in packing.keep:
        check_pattern("--keep", pattern)
    part_of = anatomy(model).part_of
    blocks = {
        n: m
        for n, m in find_units(model, None)
        if any(part_of.get(f"{n}.{p}") == "llm" for p, _ in m.named_parameters())
    }
    names = [name for name in _candidates(blocks) if part_of.get(name) == "llm"]
    kept = {name for name in names if any(re.search(pattern, name) for pattern in packing.keep)}
    for pattern in packing.keep:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"--keep {pattern}: no weight to be packed has such a name.\nTheir names look like"
                f" {', '.join([names[0], names[len(names) // 2], names[-1]] if names else ['none'])}."
            )
    names = [name for name in names if name not in kept]
    if not names:
        but = ", but those of --keep" if kept else " (torch.nn.Linear, no class of its own), and no experts"
        raise ConfigError(f"--quantize: the blocks of {type(model).__name__} have no linear layers to pack{but}.")
    layers = {name: _in_files(model, name) for name in names}
    _check_files(model, layers, packing)
    _check_experts(model, set(names), packing)
    _check_shapes(layers, packing)
    found = Places([*blocks], layers)
    found.skipped = _skipped(model, found)
    found.ignored = _ignored(model, found)
    return found


def take_samples(model: Any, places: Places) -> None:
    """Keep some evenly spread columns of each weight to be packed."""
    places.samples = {name: sampled(model.get_parameter(name)).clone() for name in places.layers}


def sampled(weight: Tensor) -> Tensor:
    """At most SAMPLED columns of [..., in], in fp32."""
    return weight.detach()[..., :: max(1, weight.shape[-1] // SAMPLED)].float()


def _candidates(blocks: dict[str, nn.Module]) -> Iterable[str]:
    """The parameters of linear layers and experts in blocks."""
    from torch import nn

    for block, module in blocks.items():
        for name, inner in module.named_modules():
            path = f"{block}.{name}" if name else block
            if WHOLE.search(f".{name}"):
                continue
            if type(inner) is nn.Linear:
                yield f"{path}.weight"
            elif name.endswith("experts"):
                yield from _stacked(path, inner)


def _stacked(path: str, experts: nn.Module) -> Iterable[str]:
    """The stacked parameters of a layer's experts."""
    return (f"{path}.{own}" for own, p in experts.named_parameters(recurse=False) if p.dim() == 3)


def _in_files(model: Any, name: str) -> dict[str, int]:
    """The linear layers as which transformers saves a parameter, with the lengths of their rows; empty if it is not
    saved as linear layers, or a single layer here is saved as several."""
    weight = model.get_parameter(name)
    saved = _saved(model, {name: weight})
    if any(value.dim() != 2 or not found.endswith(".weight") for found, value in saved.items()):
        return {}
    if sum(value.numel() for value in saved.values()) != weight.numel() or (weight.dim() == 2 and len(saved) > 1):
        return {}
    return {found.removesuffix(".weight"): value.shape[1] for found, value in saved.items()}


def _saved(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that transformers would save for these, without values; empty if it cannot."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(
            revert_weight_conversion(model, {n: torch.empty(v.shape, device="meta") for n, v in values.items()})
        )
    except Exception:  # a conversion that needs other weights, or values, may raise anything
        return {}


def _check_files(model: Any, layers: dict[str, dict[str, int]], packing: Packing) -> None:
    """Raise ConfigError if files hold a weight in a form that cannot be read packed."""
    lost = [name for name, found in layers.items() if not found]
    if lost:
        raise ConfigError(
            f"--quantize {packing.kind}: {_some(lost)} of {type(model).__name__} are stored in a form (all experts"
            f" in one tensor, or several layers in one) from which transformers cannot read packed weights.\nLeave"
            f" them unpacked, and pack the rest: --keep '{_common(lost)}'."
        )


def _check_experts(model: Any, packed: set[str], packing: Packing) -> None:
    """Raise ConfigError for experts that transformers could not read back, since it merges them from separate ones in
    files: when it reads packed weights, it expects all experts to be packed alike, even those of a talker."""
    modules = ((name, module) for name, module in model.named_modules() if name.endswith("experts"))
    every = [name for path, module in modules for name in _stacked(path, module) if _in_files(model, name)]
    whole = [name for name in every if name not in packed]
    instead = "--quantize fp8"
    if every and packing.kind == "int8":
        why, instead = "does not read in eight-bit integers", "--quantize fp8 or int4"
    elif len(every) > len(whole) and packing.kind == "nf4":
        why, instead = "does not read in four bits of bitsandbytes", "--quantize fp8 or --quantize nf4 --keep experts"
    elif whole and packing.kind == "int4":
        why, every = "does not read as they are beside layers in four bits", whole
    else:
        return
    raise ConfigError(
        f"--quantize {packing.kind}: {_some(every)} are experts, which transformers {_version()} {why}.\n"
        f"Take {instead}."
    )


def _check_shapes(layers: dict[str, dict[str, int]], packing: Packing) -> None:
    """Raise ConfigError for rows whose length is not a multiple of the group size."""
    lengths = {name: max(found.values()) for name, found in layers.items()}
    odd = [name for name, length in lengths.items() if length % packing.group_size]
    if packing.kind != "int4" or not odd:
        return
    fitting = [size for size in SIZES if not any(length % size for length in lengths.values())]
    told = " and ".join(f"{length:,}" for length in sorted({lengths[name] for name in odd}))
    instead = f"Take --group-size {fitting[0]}, which does, or l" if fitting else "L"
    raise ConfigError(
        f"--quantize int4: groups of {packing.group_size} weights do not divide the rows of {_some(odd)}, of {told}"
        f" weights.\n{instead}eave these unpacked: --keep '{_common(odd)}'."
    )


def _some(names: list[str]) -> str:
    short = list(dict.fromkeys(_pattern(name).replace(r"\d+", "*").replace("\\", "") for name in names))
    return ", ".join(short[:SHOWN]) + (" and others" if len(short) > SHOWN else "")


def _common(names: list[str]) -> str:
    """A regular expression for these parameters: the last components of their modules' names."""
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    return "|".join(sorted(ends))


def _ignored(model: Any, places: Places) -> list[str]:
    """Patterns for the linear layers that are not packed. Readers use the names in files, or those of their own model
    class, which have other prefixes: a head or a full tower is matched by its last component, and layers in blocks from
    `layers` on, with any number if all blocks are alike."""
    # Readers treat routers as linear layers, whatever their class here.
    saved = [
        name.removesuffix(".weight")
        for name, value in _saved(model, model.state_dict()).items()
        if name.endswith(".weight") and value.dim() == 2
    ]
    packed = {name.removesuffix(".weight") for name in places.layers} | places.packed
    found: dict[str, str] = {}
    for name in [*places.skipped, *(name for name in saved if name not in packed)]:
        if not any(re.fullmatch(pattern, name) for pattern in found.values()):
            pieces = name.split(".")
            first = next((i - 1 for i, piece in enumerate(pieces) if piece.isdigit()), len(pieces) - 1)
            found[name] = rf"(.*\.)?{_pattern('.'.join(pieces[first:]))}(\..*)?"
            if any(re.fullmatch(found[name], other) for other in packed):
                found[name] = re.escape(name)
    return [f"re:{pattern}$" for pattern in dict.fromkeys(found.values())]


def _skipped(model: Any, places: Places) -> list[str]:
    from torch import nn

    packed = {name.removesuffix(".weight") for name in places.layers}
    above = {".".join(pieces[:end]) for name in packed for pieces in [name.split(".")] for end in range(len(pieces))}
    found: list[str] = []
    for name, module in model.named_modules():
        if name and name not in above | packed and not any(name.startswith(f"{one}.") for one in found):
            found += [name] if any(isinstance(inner, nn.Linear) for inner in module.modules()) else []
    # vLLM uses other prefixes for a tower or a head, and also looks for the last component.
    return list(dict.fromkeys([*found, *(name.rpartition(".")[2] for name in found if not NUMBERED.search(name))]))


def _pattern(name: str) -> str:
    return r"\.".join(r"\d+" if piece.isdigit() else re.escape(piece) for piece in name.split("."))


def _version() -> str:
    import transformers

    return str(transformers.__version__)
