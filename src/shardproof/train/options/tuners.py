"""The kinds of adapters that --tuner names beside LoRA: PEFT's, with what is to be known of them before it is imported.

What each takes is said by --tuner-arguments, and checked against PEFT's own configuration of it, see
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
    """One of PEFT's.

    Attributes:
        reads: whether its first values are made of the weights, which each rank then loads whole.
        plans: where a plan makes it: PEFT looks at values of what it makes on the CPU. None: it looks at those of
            weights, or of what is computed, so that only a run counts it.
        four_bits: whether it goes on layers whose weights are packed (--quantize), as it works on what goes through
            them, and not on the weights themselves.
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
    "it puts tokens that are learnt in front of each row, or in its blocks, which no merge can take into the weights"
)
TUNERS = (FULL, LORA, *KINDS)
# Those of PEFT's, and of ms-swift's, that are not here, and why.
LEFT_OUT: dict[str, str] = {
    "lily": "it chooses by the mean of a batch, so that its numbers depend on how rows are dealt out",
    "pvera": "it draws numbers for each row, so that its numbers depend on how rows are dealt out",
    "frod": "PEFT makes sparse tensors of its parameters, in a way in which sharded ones cannot be gathered",
    "shadow": "it trains a second model of its own beside this one",
    "poly": "it wants to know the task of each row",
    "xlora": "it mixes adapters that have been trained before",
    "trainable_tokens": "--tuner lora --modules-to-save embed_tokens trains tokens, with the rest of them",
    **dict.fromkeys("prompt_tuning prefix_tuning p_tuning multitask_prompt_tuning cpt cartridge".split(), _PROMPTS),
    "adaption_prompt": _PROMPTS,
    "reft": "PEFT has no ReFT; --tuner road turns hidden states, too, and can be merged",
    "adapter": "layers between those of the model cannot be merged, and PEFT has none; --tuner lora or peanut",
    "longlora": "its shifted attention is of a Llama of an old transformers; --sequence-parallel takes long rows whole",
    "llamapro": "new blocks are part of the model: --tuner full --new-blocks 4",
    "unsloth": "it is another program",
}
OTHER_NAMES = {"bone": "miss"}


def reads_weights(tuner: str) -> bool:
    """Whether what is trained is made of the weights, which then have to be there."""
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
    """A file may say numbers, lists and so on of what is text on a command line."""
    if not isinstance(arguments, dict):
        return arguments
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}


Tuner = Annotated[str, AfterValidator(_tuner)]
TunerArguments = Annotated[dict[str, str], BeforeValidator(_as_text)]
