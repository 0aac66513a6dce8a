"""The options of a run about its model: which it is, what of it is trained, and with which adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shardproof.train.options.option import BEGINNINGS, Beginning, Finite, Named, Names, option
from shardproof.train.options.tuners import TUNERS, Tuner, TunerArguments


class ModelOptions(BaseModel):
    """The first options of every recipe."""

    model: Named = option(
        "Model", "", "required: folder or hub name (MS::OWNER/NAME: on ModelScope); 'tiny' builds a small one, to try"
    )
    model_revision: str | None = option(
        "Model", None, "a branch, tag or commit of a model of the hub (default: its newest state)"
    )
    adapters: Named | None = option(
        "Model", None, "continue training these adapters: a run, or a folder of PEFT's; they name their model, too"
    )
    tuner: Tuner = option(
        "Model", "full", "train every weight, LoRA adapters only, or other adapters of PEFT's", values="|".join(TUNERS)
    )
    tuner_arguments: TunerArguments = option(
        "Model", {}, "with such a kind: what PEFT's configuration of it takes, such as boft_block_size=4"
    )
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    lora_alpha: Finite = option("Model", 32.0, "scale of the adapters (alpha / rank)", gt=0)
    lora_dropout: float = option("Model", 0.0, "dropout on what goes into the adapters", ge=0, lt=1)
    rslora: bool = option("Model", False, "scale the adapters by alpha / sqrt(rank) (rsLoRA)")
    lorap_lr_ratio: Finite = option(
        "Model", 1.0, "learning rate of the adapters' second matrices (B), over that of the first (LoRA+: 16)", gt=0
    )
    dora: bool = option("Model", False, "train the magnitude of weights apart from their direction (DoRA)")
    init_lora_weights: Beginning | None = option(
        "Model",
        None,
        f"how the adapters begin: {BEGINNINGS}; the last three as a part of the weights (default: as nothing, B = 0)",
    )
    quantize: Literal["nf4", "fp4"] | None = option(
        "Model", None, "with --tuner lora: keep the frozen weights of the language model's blocks in four bits (QLoRA)"
    )
    target_modules: list[str] = option(
        "Model",
        ["all-linear"],
        "modules that get adapters: names, or a regular expression for full names; 'all-linear': all but the head",
    )
    target_parameters: list[str] = option(
        "Model", [], "matrices that get adapters, too, by the ends of their names: experts that are one tensor"
    )
    modules_to_save: list[str] = option(
        "Model", [], "modules or parts trained in full beside the adapters: embed_tokens, lm_head; vision, aligner, ..."
    )
    attn: str | None = option(
        "Model",
        None,
        "attention: eager, sdpa, varlen, flash_attention_2, ... (default: the model's; of packed rows, varlen)",
    )
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")

    freeze: Names = option("Parts", [], "parts that are not trained: llm, vision, audio, aligner, talker")
    train_parts: Names | None = option(
        "Parts", None, "parts that are trained; 'thinker' is all but the talker, and the default"
    )
    freeze_parameters: list[str] = option(
        "Parts", [], "more parameters that are not trained: regular expressions, found anywhere in their names"
    )
    trainable_parameters: list[str] = option(
        "Parts", [], "parameters that are trained although an option above freezes them, in the same form"
    )
    part_learning_rates: dict[str, Annotated[Finite, Field(ge=0)]] = option(
        "Parts", {}, "peak learning rates of single parts: vision=1e-5,aligner=2e-5"
    )
    enable_audio_output: bool | None = option(
        "Parts", None, "build and load the modules that speak, or leave them out (default: as the model's config says)"
    )
