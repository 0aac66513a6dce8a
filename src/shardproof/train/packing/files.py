"""Rewrites a folder of plain weights as packed ones: file by file, weight by weight."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.models.loading.mtp import OWN
from shardproof.models.loading.weight_files import INDEX
from shardproof.train.packing.kinds import PRESETS, Packing, rows_together, scales_of, scheme_of
from shardproof.train.packing.places import Places

if TYPE_CHECKING:
    from torch import Tensor


def pack_folder(folder: Path, places: Places, packing: Packing, scales: Mapping[str, Tensor], dtype: Any) -> None:
    """Pack the weights of a folder, and record it in its config. Memory holds one weight and the contents of one file.

    Args:
        scales: scales of weights that are rounded already, by the names of linear layers in files: [out, groups].
        dtype: the dtype to compute in.
    """
    further = _further(folder)
    if packing.kind in PRESETS:
        ignored = [*places.ignored, *(rf"re:{re.escape(name)}(\..*)?$" for name in further)]
        in_bits, said = _compressed(packing, ignored, scales)
    else:
        in_bits, said = _of_bitsandbytes(packing.kind, [*places.skipped, *further], dtype)
    names: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        names |= _rewritten(file, places.packed, in_bits)
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index["metadata"]["total_size"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        (folder / INDEX).write_text(json.dumps(index | {"weight_map": names}, indent=2), encoding="utf-8")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"quantization_config": said}, indent=2) + "\n", encoding="utf-8")


def _further(folder: Path) -> list[str]:
    """The modules for multi-token prediction, which stay unpacked and are in no transformers model: names up to their
    first number."""
    from safetensors import safe_open

    if not (folder / OWN).is_file():
        return []
    with safe_open(folder / OWN, framework="pt") as content:
        layers = [name.rpartition(".")[0] for name in content.keys()]  # noqa: SIM118  (not a dict)
    return sorted({re.sub(r"(\.\d+)\..*", r"\1", layer) for layer in layers})


Packs = Callable[[str, "Tensor"], dict[str, "Tensor"]]  # from a layer's name and weight to the tensors in files


def _compressed(packing: Packing, ignored: list[str], scales: Mapping[str, Tensor]) -> tuple[Packs, dict[str, Any]]:
    """How to pack in compressed-tensors' format, and the entry for the config."""
    import compressed_tensors
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = scheme_of(packing)
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format.value)

    def in_bits(name: str, weight: Tensor) -> dict[str, Tensor]:
        found = scales.get(name)
        scale = scales_of(weight, scheme.weights) if found is None else found.to(weight.dtype)
        rows = rows_together(weight)
        parts = [  # in fp32: half precision would round before the rounding to integers
            compressor.compress({"weight": part.float(), "weight_scale": by.float()}, scheme)
            for part, by in zip(weight.split(rows), scale.split(rows), strict=True)
        ]
        made = {own: torch.cat([part[own] for part in parts]) for own in parts[0]} | {"weight_scale": scale}
        if "weight_shape" in made:
            made["weight_shape"] = torch.tensor(weight.shape)
        return {f"{name}.{own}": value for own, value in made.items()}

    told = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=ignored, format=scheme.format.value, quantization_status="compressed"
    )
    said = json.loads(told.model_dump_json(exclude={"quant_method"}))
    return in_bits, said | {"quant_method": "compressed-tensors", "version": compressed_tensors.__version__}


def _of_bitsandbytes(kind: str, skipped: list[str], dtype: Any) -> tuple[Packs, dict[str, Any]]:
    """How to pack in transformers' format for bitsandbytes, and the entry for the config."""
    from bitsandbytes.functional import quantize_4bit
    from transformers import BitsAndBytesConfig

    from shardproof.integrations.four_bits import BLOCK

    def in_bits(name: str, weight: Tensor) -> dict[str, Tensor]:
        packed, state = quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type=kind)
        own = state.as_dict(packed=True)
        return {f"{name}.weight": packed, **{f"{name}.weight.{key}": value for key, value in own.items()}}

    how = {"bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped, **how)
    return in_bits, config.to_dict()


def _rewritten(file: Path, packed: set[str], in_bits: Packs) -> dict[str, str]:
    """Rewrite a file. Returns the file's name for each tensor in it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    values: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as content:
        for name in content.keys():  # noqa: SIM118  (not a dict)
            value, layer = content.get_tensor(name), name.removesuffix(".weight")
            values |= in_bits(layer, value) if name != layer and layer in packed else {name: value}
        metadata = content.metadata()
    aside = file.with_suffix(".packed")
    save_file(values, aside, metadata=metadata)
    aside.replace(file)
    return dict.fromkeys(values, file.name)
