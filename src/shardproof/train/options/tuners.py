"""The kinds of PEFT adapters that --tuner accepts besides LoRA, with what has to be known about them before PEFT is
imported.

Their arguments are given with --tuner-arguments and checked against PEFT's own configuration, see
`train.adapters.kinds`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from shardproof.errors import did_you_mean

FULL, LORA, ADALORA, LN_TUNING = "full", "lora", "adalora", "ln_tuning"


@dataclass(frozen=True)
class Kind:
    """A kind of PEFT adapters.

    Attributes:
        reads: whether it is initialised from the weights, which each rank then loads in full.
        plans: the device on which a plan builds it: the CPU if PEFT reads values that it has created. None: PEFT reads
            values of weights or of activations, so that only a run can count its memory.
        four_bits: whether it works with layers whose weights are packed (--quantize), because it acts on activations
            rather than on the weights themselves.
        half: whether it computes in half precision.
    """

    reads: bool = False
    plans: str | None = "meta"
    four_bits: bool = False
    half: bool = True


_THROUGH, _OF_WEIGHTS = Kind(four_bits=True), Kind(reads=True, plans=None)
KINDS = {
    ADALORA: _THROUGH,
    "adamss": Kind(reads=True, plans=None, half=False),
    "beft": _THROUGH,
    "boft": Kind(four_bits=True, plans="cpu"),
    "c3a": _THROUGH,
    "deft": _OF_WEIGHTS,
    "delora": _OF_WEIGHTS,
    "fourierft": _THROUGH,
    "glora": Kind(),
    "gralora": _THROUGH,
    "hira": Kind(),
    "hra": Kind(),
    "ia3": _THROUGH,
    LN_TUNING: _THROUGH,
    "loha": Kind(),
    "lokr": Kind(),
    "miss": _THROUGH,
    "oft": _THROUGH,
    "osf": _OF_WEIGHTS,
    "peanut": Kind(),
    "psoft": _OF_WEIGHTS,
    "randlora": _THROUGH,
    "road": _THROUGH,
    "shira": Kind(plans=None),
    "supertuning": _OF_WEIGHTS,
    "tinylora": _OF_WEIGHTS,
    "unilora": Kind(four_bits=True, plans="cpu"),
    "vblora": Kind(four_bits=True, plans=None),
    "vera": _THROUGH,
    "waveft": _THROUGH,
}
_PROMPTS = (
    "it puts learned tokens in front of each row, or into the blocks, and these cannot be merged into the weights"
)
TUNERS = (FULL, LORA, *KINDS)
# Kinds of PEFT and ms-swift that are not supported, and why.
LEFT_OUT: dict[str, str] = {
    "lily": "it decides by the mean of a batch, so its results depend on how rows are distributed to processes",
    "pvera": "it draws random numbers for each row, so its results depend on how rows are distributed to processes",
    "frod": "PEFT builds sparse tensors from its parameters in a way that does not work with sharded ones",
    "shadow": "it trains a second model beside this one",
    "poly": "it needs to know the task of each row",
    "xlora": "it mixes adapters that are already trained",
    "trainable_tokens": "--tuner lora --modules-to-save embed_tokens trains tokens, together with all others",
    **dict.fromkeys("prompt_tuning prefix_tuning p_tuning multitask_prompt_tuning cpt cartridge".split(), _PROMPTS),
    "adaption_prompt": _PROMPTS,
    "reft": "PEFT has no ReFT; --tuner road also rotates hidden states, and can be merged",
    "adapter": "layers between those of the model cannot be merged, and PEFT has none; --tuner lora or peanut",
    "longlora": "its shifted attention is for Llama in an old transformers; for long rows, use --sequence-parallel",
    "llamapro": "new blocks are part of the model: --tuner full --new-blocks 4",
    "unsloth": "it is a separate program",
}
OTHER_NAMES = {"bone": "miss"}


def reads_weights(tuner: str) -> bool:
    """Whether the adapters are initialised from the weights, which then have to be loaded."""
    return tuner in KINDS and KINDS[tuner].reads


def _tuner(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.lower().replace("-", "_")
    name = OTHER_NAMES.get(name, name)
    if name in TUNERS:
        return name
    if name in LEFT_OUT:
        raise ValueError(LEFT_OUT[name])
    raise ValueError(
        f"should be 'full' or 'lora', or one of PEFT's tuners.{did_you_mean(name, TUNERS)} These are {', '.join(KINDS)}"
    )


def _as_text(arguments: Any) -> Any:
    """A YAML file may give numbers, lists and so on where the command line gives text."""
    if not isinstance(arguments, dict):
        return arguments
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}


Tuner = Annotated[str, AfterValidator(_tuner)]
TunerArguments = Annotated[dict[str, str], BeforeValidator(_as_text)]
