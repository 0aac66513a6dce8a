"""The equivalents of ms-swift's tuners other than LoRA, and of GaLore."""

from __future__ import annotations

from shardproof.cli.from_swift.missing import is_on
from shardproof.train.options.tuners import OTHER_NAMES

OF_TUNER = {  # ms-swift's defaults, by kind, where PEFT's differ
    "adalora": {"lora_alpha": "32", "lora_dropout": "0.05"},
    "fourierft": {"n_frequency": "2000", "scaling": "300"},
    "miss": {"r": "8"},
}
# Which of LoRA's options ms-swift passes on to them, and under which name.
OF_LORA = {
    "adalora": {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"},
    "miss": {"lora_rank": "r"},
}


def with_new_blocks(values: dict[str, list[str]]) -> None:
    """LLaMA-Pro trains blocks that are added to a model; it is not a tuner here."""
    if values.get("tuner", [""])[0].lower() == "llamapro":
        values["tuner"] = ["full"]
        values.setdefault("new_blocks", ["4"])
        values.setdefault("learning_rate", ["1e-4"])  # ms-swift's default for all but full


def of_other_tuners(values: dict[str, list[str]]) -> None:
    """The options that ms-swift's other adapters share with LoRA, and their defaults, under PEFT's names."""
    kind = values["tuner"][0].lower()
    if kind in ("full", "lora") or "adapters" in values:
        return
    kind = OTHER_NAMES.get(kind, kind)
    given = {pair.partition("=")[0]: pair for pair in values.get("tuner_arguments", [])}
    for theirs, name in OF_LORA.get(kind, {}).items():
        if theirs in values:
            given.setdefault(name, f"{name}={values.pop(theirs)[0]}")
    for name, value in OF_TUNER.get(kind, {}).items():
        given.setdefault(name, f"{name}={value}")
    if given:
        values["tuner_arguments"] = [*given.values()]


# Options of ms-swift's other adapters, under the names of PEFT's configurations.
OF_TUNERS = {
    **{f"adalora_{name}": name for name in ("target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2")},
    "adalora_orth_reg_weight": "orth_reg_weight",
    **{f"boft_{name}": f"boft_{name}" for name in ("block_size", "block_num", "n_butterfly_factor", "dropout")},
    "vera_rank": "r",
    **{f"vera_{name}": name for name in ("projection_prng_key", "d_initial")},
    "vera_dropout": "vera_dropout",
    **{f"fourier_{name}": name for name in ("n_frequency", "scaling")},
}


def of_tuner(name: str, values: list[str]) -> list[tuple[str, list[str]]]:
    return [("tuner_arguments", [f"{name}={values[0]}"])] if values and values[0].lower() != "none" else []


OF_GALORE = {"galore_rank": "rank", "galore_update_proj_gap": "update_gap", "galore_scale": "scale"}


def of_galore(name: str, values: list[str]) -> list[tuple[str, list[str]]]:
    return [("optimizer_arguments", [f"{name}={values[0]}"])] if values else []


def use_galore(values: list[str]) -> list[tuple[str, list[str]]]:
    return [("optimizer", ["galore"])] if is_on(values) else []
