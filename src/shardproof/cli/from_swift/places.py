"""ms-swift's commands about a finished model: options that have another name here, or none, since the run and the
output folder are positional arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardproof.cli.from_swift.hubs import PUSHED
from shardproof.cli.from_swift.missing import is_on, missing
from shardproof.cli.from_swift.models import taken_of_files
from shardproof.cli.from_swift.options import VALUES, as_words, ours, split_options
from shardproof.data.sources import modelscope
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

# The run, by the option that says most about it: adapters name their base model.
RUN = ("adapters", "ckpt_dir", "resume_from_checkpoint", "model", "model_id_or_path")

RENAMED = {
    "infer": {"val_dataset": "dataset", "max_batch_size": "batch_size", "vllm_tensor_parallel_size": "nproc"},
    "export": {"torch_dtype": "dtype", "quant_n_samples": "samples", "hub_private_repo": "private"},
}
# How weights are packed, by ms-swift's method and bits. AWQ and GPTQ write the same format.
PACKED = {
    ("fp8", ""): "fp8",
    ("bnb", "4"): "nf4",
    **{(method, "4"): "int4" for method in ("awq", "gptq", "gptq_v2")},
    **{(method, "8"): "int8" for method in ("gptq", "gptq_v2")},
}
PUSHES = ("true", "false", "")  # ms-swift's values of an option that names a repository here
CALIBRATED = ("awq", "gptq", "gptq_v2")
WITHOUT_EFFECT = {
    "infer": {
        "merge_lora": "adapters are used unmerged",
        "torch_dtype": "weights keep the dtype of their files",
        "attn_impl": "the model's own",
        "load_data_args": "--dataset names the rows to answer; without it the command chats",
        "load_args": "a run's template and system message always apply",
        "write_batch_size": "each answer is written as soon as it is complete",
        "strict": "this is the default here, --bad-rows stop",
        **dict.fromkeys(("max_length", "truncation_strategy"), "questions are never cut"),
        "device_map": "--nproc shards the model over processes",
        "val_dataset_shuffle": "answers are in the order of the rows",
        **dict.fromkeys(("task_type", "num_labels", "problem_type"), "it is read from the model"),
    },
    "export": {
        "merge_lora": "adapters are always merged",
        "template": "the template is saved with the tokenizer",
        "device_map": "weights are merged in host memory",
        "merge_device_map": "weights are merged in host memory",
        "quant_batch_size": "rows go through the model one by one",
        "bnb_4bit_compute_dtype": "it is the dtype of the weights that are not packed",
        "bnb_4bit_quant_storage": "transformers and vLLM read bytes (uint8)",
    },
}
# By command and option: values that ask for what happens anyway, and what to do about other values.
INSTEAD = {
    ("infer", "infer_backend"): (("pt", "transformers"), "--backend takes transformers and vllm"),
    ("infer", "logprobs"): (("none", "false"), "'shardproof export', then 'vllm serve FOLDER'"),
    ("infer", "top_logprobs"): (("none",), "'shardproof export', then 'vllm serve FOLDER'"),
    ("infer", "val_dataset_sample"): (("none",), "--val-dataset FILE#N takes N rows"),
    ("infer", "split_dataset_ratio"): (("0", "0.0", "0."), "--val-dataset names the rows"),
    ("infer", "model_revision"): (
        ("none",),
        "run 'hf download MODEL --revision X --local-dir FOLDER' and name that folder",
    ),
    ("export", "model_revision"): (
        ("none",),
        "run 'hf download MODEL --revision X --local-dir FOLDER' and name that folder",
    ),
    ("export", "to_cached_dataset"): (
        ("false",),
        "'shardproof data encode' does that",
    ),
    ("export", "to_mcore"): (("false",), "Megatron's tools read the exported folder"),
    ("export", "bnb_4bit_quant_type"): (("nf4",), "--quantize nf4 uses the more accurate of the two"),
    ("export", "bnb_4bit_use_double_quant"): (("true",), "scales are always packed too"),
    ("export", "load_data_args"): (("false",), "--dataset names the rows to calibrate with"),
    ("export", "to_ollama"): (("false",), "'ollama create' reads the exported folder"),
    ("export", "to_peft_format"): (("false",), "a run's adapters are in PEFT's format"),
}


def placed(command: str, argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line with ms-swift's options renamed to ours and put in our order.

    Args:
        command: infer or export.
        argv: options with hyphens.
        known: the command's own options, with underscores.

    Returns: the command line, and remarks on what has no effect here.

    Raises:
        ConfigError: an option has no equivalent, or something is given twice.
    """
    places: list[str] = []
    words: list[str] = []
    notes: list[str] = []
    runs: dict[str, str] = {}
    method: dict[str, str] = {}
    pushed: dict[str, str] = {}
    on_hugging_face = False
    target: str | None = None
    for given, values in split_options(argv, places):
        name, text = given[2:].replace("-", "_"), " ".join(values)
        if name in RUN:
            if len(values) != 1 or name in runs:
                raise ConfigError(f"{given} {text}: give one folder.")
            runs[name] = text
        elif command == "export" and name == "output_dir":
            target = text
        elif command == "export" and name in ("quant_method", "quant_bits"):
            method[name] = text.lower().replace("none", "")
        elif command == "export" and (name == PUSHED or (name == "push_to_hub" and text.lower() in PUSHES)):
            pushed[name] = text
        elif name in RENAMED[command]:
            option = RENAMED[command][name]
            meant = VALUES["precision"] if option == "dtype" else {}
            words += [flag(option), *(meant.get(value.lower(), value) for value in values)]
        elif name in WITHOUT_EFFECT[command]:
            notes.append(f"{given} ({WITHOUT_EFFECT[command][name]})")
        elif (command, name, text.lower()) == ("infer", "infer_backend", "vllm"):
            words += ["--backend", "vllm"]
        elif (command, name) in INSTEAD:
            harmless, instead = INSTEAD[command, name]
            if text.lower() not in harmless:
                raise missing(f"{given} {text}", instead)
            notes.append(f"{given} (this is what happens here)")
        else:  # as for a run, whose options include ms-swift's common ones
            on_hugging_face |= name == "use_hf" and is_on(values)
            found = ours(name, values, known)
            if isinstance(found, str):
                notes.append(f"{given} ({found})")
            elif found is None or not all(option in known for option, _ in found):
                words += as_words(given, values)
            else:
                words += [w for option, said in found for w in as_words(flag(option), said)]
    kind = _packed(method, words, notes)
    words += _pushed(pushed, on_hugging_face, notes)
    if not runs and target is None:
        return [*places, *words], notes
    named = next((name for name in RUN if name in runs), None)
    if named is not None and places:
        raise ConfigError(f"{flag(named)} and {places[0]} both name the run. Give one of them.")
    notes += [f"{flag(name)} (given by --{named})" for name in RUN if name in runs and name != named]
    if command == "export" and len(places) < 2:
        source = runs[named] if named is not None else "".join(places)
        base = (modelscope.named(source) or source).rstrip("/")
        places = [source, target if target is not None else f"{base}-{kind or 'merged'}"]
    elif named is not None:
        places = [runs[named]]
    return [*places, *words], notes


_OF_ANSWERS = {
    "--max-new-tokens": "an answer has at most 128 tokens unless --max-new-tokens is given; in ms-swift the limit is"
    " what the model can hold",
    "--temperature": "decoding is greedy unless --temperature is given; in ms-swift the model's generation_config sets"
    " the sampling",
}


def defaults_of_infer(theirs: Mapping[str, Sequence[str]], words: Sequence[str], notes: list[str]) -> list[str]:
    """ms-swift's defaults as our options, unless they are given; `notes` collects those without an option."""
    notes += [note for option, note in _OF_ANSWERS.items() if option not in words]
    if "adapters" in theirs:  # a run has its own
        return []
    given = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
    taken = taken_of_files(" ".join(theirs.get("model", "")), given)
    return [word for name, value in taken.items() for word in (flag(name), value)]


def _pushed(said: dict[str, str], on_hugging_face: bool, notes: list[str]) -> list[str]:
    """Where ms-swift pushes a model, as our options. A repository name alone pushes nothing.

    Raises:
        ConfigError: a push is asked for without a name, or the hub is ambiguous.
    """
    name = said.get(PUSHED, "none")
    if said.get("push_to_hub", "false").lower() not in ("true", ""):
        notes += [f"{flag(option)} (nothing is pushed)" for option in said]
        return []
    if name.lower() in ("", "none"):
        raise ConfigError("--push-to-hub true needs --hub-model-id OWNER/NAME.")
    if not on_hugging_face and modelscope.named(name) is None:
        raise ConfigError(
            f"--push-to-hub true --hub-model-id {name}: ms-swift pushes to ModelScope's hub unless --use-hf true is"
            f" given. Choose one: --push-to-hub MS::{name}, or {name} for Hugging Face's."
        )
    return ["--push-to-hub", name]


def _packed(said: dict[str, str], words: list[str], notes: list[str]) -> str:
    """Add to a command how ms-swift packs weights. Returns the kind, if any.

    Raises:
        ConfigError: there is no kind for this method and number of bits, or the method is missing.
    """
    method, bits = said.get("quant_method", ""), said.get("quant_bits", "")
    if not method:
        if bits:
            raise missing(f"--quant-bits {bits}", "--quantize takes the kind: int4, int8, fp8 or nf4")
        return ""
    kind = PACKED.get((method, "" if method == "fp8" else bits))
    if kind is None:
        told = f"--quant-method {method}" + (f" --quant-bits {bits}" if bits else "")
        raise missing(told, f"--quantize takes fp8, int8, int4 and nf4{_WHY.get((method, bits), '')}")
    words += ["--quantize", kind]
    if method in CALIBRATED and "--dataset" not in words:
        raise missing(
            f"--quant-method {method} without --dataset", "name rows to calibrate with, or use --quantize int4"
        )
    if method == "awq":
        notes.append("the scaling of --quant-method awq (weights of the same format are rounded as in GPTQ)")
    if kind != "int4" and "--group-size" in words:
        place = words.index("--group-size")
        notes.append(f"{' '.join(words[place : place + 2])} ({kind} has a fixed layout of scales)")
        del words[place : place + 2]
    if kind == "int8":
        notes.append("inputs in sixteen bits (int8 also rounds the inputs of layers when they compute)")
    return kind


_WHY = {("bnb", "8"): "; int8 is the fastest 8-bit format", ("awq", "8"): "; AWQ has four bits"}
