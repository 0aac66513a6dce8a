"""Options for the model: which one it is, which parts are trained, and with which adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shardproof.train.options.option import BEGINNINGS, Beginning, Finite, Named, Names, option
from shardproof.train.options.tuners import TUNERS, Tuner, TunerArguments


class ModelOptions(BaseModel):
    """Options for the model, shared by all recipes."""

    model: Named = option(
        "Model",
        "",
        "required: folder or hub name (MS::OWNER/NAME: on ModelScope); 'tiny' builds a small one for trying things out",
    )
    model_revision: str | None = option("Model", None, "branch, tag or commit of a hub model (default: the newest)")
    adapters: Named | None = option(
        "Model", None, "continue training these adapters: a run, or a PEFT folder; they name their model"
    )
    tuner: Tuner = option(
        "Model", "full", "train every weight, LoRA adapters, or another kind of PEFT adapters", values="|".join(TUNERS)
    )
    tuner_arguments: TunerArguments = option(
        "Model", {}, "arguments for the PEFT configuration of such a kind, such as boft_block_size=4"
    )
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    lora_alpha: Finite = option("Model", 32.0, "scale of the adapters (alpha / rank)", gt=0)
    lora_dropout: float = option("Model", 0.0, "dropout on the input of the adapters", ge=0, lt=1)
    rslora: bool = option("Model", False, "scale the adapters by alpha / sqrt(rank) (rsLoRA)")
    lorap_lr_ratio: Finite = option(
        "Model", 1.0, "learning rate of the adapters' B matrices, relative to that of A (LoRA+: 16)", gt=0
    )
    dora: bool = option("Model", False, "train the magnitude of weights separately from their direction (DoRA)")
    init_lora_weights: Beginning | None = option(
        "Model",
        None,
        f"initial adapters: {BEGINNINGS}; the last three take over a part of the weights (default: B = 0, no effect)",
    )
    quantize: Literal["nf4", "fp4"] | None = option(
        "Model", None, "with --tuner lora: hold the frozen weights of the language model's blocks in four bits (QLoRA)"
    )
    target_modules: list[str] = option(
        "Model",
        ["all-linear"],
        "modules that get adapters: names, or a regular expression for full names; 'all-linear': all but the head",
    )
    target_parameters: list[str] = option(
        "Model", [], "parameters that also get adapters, by the ends of their names: for experts stacked in one tensor"
    )
    modules_to_save: list[str] = option(
        "Model",
        [],
        "modules or parts that are fully trained beside the adapters: embed_tokens, lm_head; vision, aligner, ...",
    )
    attn: str | None = option(
        "Model",
        None,
        "attention: eager, sdpa, varlen, flash_attention_2, ... (default: the model's; varlen for packed rows)",
    )
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")

    freeze: Names = option("Parts", [], "parts that are not trained: llm, vision, audio, aligner, talker")
    train_parts: Names | None = option(
        "Parts", None, "parts that are trained; 'thinker' is all but the talker, and the default"
    )
    freeze_parameters: list[str] = option(
        "Parts", [], "further parameters that are not trained: regular expressions, searched for in their names"
    )
    trainable_parameters: list[str] = option(
        "Parts", [], "parameters that are trained although an option above freezes them, in the same form"
    )
    part_learning_rates: dict[str, Annotated[Finite, Field(ge=0)]] = option(
        "Parts", {}, "peak learning rates of individual parts: vision=1e-5,aligner=2e-5"
    )
    enable_audio_output: bool | None = option(
        "Parts",
        None,
        "build and load the modules that produce speech, or leave them out (default: as the model's config says)",
    )
