"""ms-swift options whose values have to be translated, each with the function that does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.cli.from_swift import ray
from shardproof.cli.from_swift.environment import of_model_kwargs
from shardproof.cli.from_swift.missing import INSTEAD, is_on, missing
from shardproof.cli.from_swift.tuners import OF_GALORE, OF_TUNERS, of_galore, of_tuner, use_galore
from shardproof.data.encoding.agents import check_agent
from shardproof.data.encoding.weights import BUILT_IN
from shardproof.data.forms.formats import FIELDS
from shardproof.errors import ConfigError
from shardproof.train.options.option import BEGINNINGS, REPORTS

HIDES = ("_", "-")  # dummy fields that ms-swift's column lists map unwanted columns to
Ours = list[tuple[str, list[str]]]  # our option and its values


def _precision(name: str, values: list[str]) -> Ours:
    """`--bf16 true` and `--fp16 true`."""
    on = is_on(values)
    return [("precision", [name])] if on else []


def _scheduler_kwargs(values: list[str]) -> Ours:
    text = " ".join(values)
    if not text.lstrip().startswith("{"):
        return [("lr_scheduler_kwargs", values)] if text.lower() != "none" else []  # already in our form
    try:
        found = json.loads(text, parse_float=str, parse_int=str)
    except ValueError:
        raise ConfigError(f"--lr-scheduler-kwargs {text} is not a JSON object.") from None
    return [("lr_scheduler_kwargs", [f"{name}={value}" for name, value in found.items()])]


def _checkpointing(values: list[str]) -> Ours:
    try:
        wanted = json.loads(" ".join(values))
        unknown = set(wanted) - {"use_reentrant"}
    except (ValueError, TypeError):
        raise ConfigError(f"--gradient-checkpointing-kwargs {' '.join(values)} is not a JSON object.") from None
    if unknown:
        raise ConfigError(f"--gradient-checkpointing-kwargs: {', '.join(sorted(unknown))} has no equivalent here.")
    return [("checkpointing_reentrant", ["yes" if wanted.get("use_reentrant") else "no"])]


def _sampling(values: list[str]) -> Ours:
    """The name of transformers 5, which ms-swift passes on."""
    if (name := " ".join(values)) not in ("random", "group_by_length"):
        there = f"it takes random and group_by_length: {INSTEAD['train_dataloader_shuffle']}"
        raise missing(f"--train-sampling-strategy {name}", there)
    return [("group_by_length", ["yes"])] if name == "group_by_length" else []


# transformers' names for the optimizers that exist here.
OPTIM = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "galore_adamw": "galore",
}


def _optim(values: list[str]) -> Ours:
    name = " ".join(values).lower()
    if name not in OPTIM and name != "none":
        others = "for another optimizer use --external-plugins and --optimizer"
        raise missing(f"--optim {name}", f"it takes {', '.join(OPTIM)}; {others}")
    found = OPTIM.get(name)
    return [("optimizer", [found])] if found else []


# ms-swift's own optimizers that other options select here.
ASKED_BY = {
    "lorap": "--lorap-lr-ratio 16 is LoRA+ with any optimizer: leave --optimizer out",
    "multimodal": "--part-learning-rates works with any optimizer: leave --optimizer out",
}


def _optimizer(values: list[str]) -> Ours:
    name = " ".join(values).lower()
    if name in ASKED_BY:
        raise missing(f"--optimizer {name}", ASKED_BY[name])
    return [("optimizer", values)]


# Trackers that ms-swift and transformers report to, and that are not supported here.
_REPORTS = {"all", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "neptune"}


def _report_to(values: list[str]) -> Ours:
    if others := [name for name in ",".join(values).split(",") if name.lower() in _REPORTS]:
        raise missing(f"--report-to {' '.join(others)}", f"it takes {', '.join(REPORTS)}")
    return [("report_to", values)]


def _save_limit(values: list[str]) -> Ours:
    """The limit of checkpoints; -1 keeps all."""
    return [("save_total_limit", values)] if values not in (["-1"], ["none"], ["None"]) else []


FSDP2 = {"fsdp": "full_shard auto_wrap", "fsdp_config": {}}  # ms-swift's file of that name


def _fsdp(values: list[str]) -> Ours:
    """The name of an ms-swift file, or the user's own file in transformers' format. Its entry about recomputing
    activations is --gradient-checkpointing, which both do by default."""
    text = " ".join(values)
    if text.lower() == "none":
        return []
    try:
        said: Any = FSDP2 if text == "fsdp2" else json.loads(Path(text).read_text(encoding="utf-8"))
        words, config = str(said["fsdp"]).split(), dict(said.get("fsdp_config") or {})
    except (OSError, ValueError, KeyError, TypeError):
        raise missing(f"--fsdp {text}", "it is neither fsdp2 nor a JSON file of 'fsdp' and 'fsdp_config'") from None
    kept = "shard_grad_op" in words or config.get("reshard_after_forward") is False
    found = [("stage", ["2" if kept else "3"])]
    found += [("offload", ["all"])] if "offload" in words else []
    return found + ([("activation_offloading", ["yes"])] if config.get("activation_cpu_offload") else [])


def _bits(values: list[str]) -> Ours:
    """The bits of a base packed by bitsandbytes."""
    bits = " ".join(values).lower()
    if bits not in ("4", "none"):
        raise missing(f"--quant-bits {bits}", "--quantize nf4 keeps a frozen base in four bits")
    return [("quantize", ["nf4"])] if bits == "4" else []


def _init_weights(values: list[str]) -> Ours:
    """The initialisation of adapters, in PEFT's terms."""
    name = " ".join(values)
    if name.lower() in ("true", "none"):
        return []
    if name.lower() == "false":
        why = "adapters would start at random and change the model"
        raise missing("--init-weights false", f"{why}. It takes {BEGINNINGS}")
    return [("init_lora_weights", values)]


def _sleep(values: list[str]) -> Ours:
    """The sleep level of vLLM in the training processes; at ms-swift's level 1 vLLM keeps its weights on the host, and
    here it gets them again."""
    return [] if " ".join(values).lower() in ("0", "none") else [("vllm_sleep", ["yes"])]


RANKING = {  # ms-swift 3 had four
    **dict.fromkeys(("pointwise_reranker", "reranker", "generative_reranker"), "pointwise"),
    **dict.fromkeys(("listwise_reranker", "listwise_generative_reranker"), "listwise"),
}


def _loss_type(values: list[str]) -> Ours:
    """A loss for embeddings, rerankers or sft, or a plugin's; DFT has its own option there."""
    value = " ".join(values)
    if value.lower() in ("none", "loss_scale", "cross_entropy"):  # token weights are used in any case
        return []
    if value == "online_contrastive":
        takes = "--task embedding takes --loss infonce, cosine_similarity and contrastive"
        raise missing(f"--loss-type {value}", takes)
    return [("loss_type", values)] if value in ("nll", "dft") else [("loss", [RANKING.get(value, value)])]


def _loss_scale(values: list[str]) -> Ours:
    """Which tokens are trained on, and sets of token weights, in one word there:
    `last_round+react+ignore_empty_think`."""
    learnt, *sets = (parts := " ".join(values).split("+"))
    if learnt not in ("default", "last_round", "all"):
        learnt, sets = "default", parts
    sets = [name for name in sets if name != "base"]
    ignores = "ignore_empty_think" in sets
    sets = [name for name in sets if name != "ignore_empty_think"]
    if not set(sets) <= set(BUILT_IN) or (ignores and learnt == "all"):
        return [("loss_scale", values)]  # refused here
    loss = {"default": "answer"}.get(learnt, learnt) + "+ignore_empty_think" * ignores
    return [("loss", [loss]), *([("token_weights", sets)] if sets else [])]


def _agent(values: list[str]) -> Ours:
    check_agent(" ".join(values))
    return [("agent_template", values)]


def _dft(values: list[str]) -> Ours:
    on = is_on(values)
    return [("loss_type", ["dft"])] if on else []


def _rope(values: list[str]) -> Ours:
    """A kind (`yarn`), or a JSON object with a kind and a factor."""
    text = " ".join(values)
    if text.lower() == "none":
        return []
    if not text.lstrip().startswith("{"):
        return [("rope_scaling", values if "=" in text else [f"type={text}"])]
    try:
        said = json.loads(text)
    except ValueError:
        raise ConfigError(f"--rope-scaling {text} is not a JSON object.") from None
    said = {("type" if name == "rope_type" else name): value for name, value in said.items()}
    return [("rope_scaling", [f"{name}={value}" for name, value in said.items()])]


def _columns(values: list[str]) -> Ours:
    """ms-swift maps a file's column to a field; here a field names its column. An unknown field hides a column
    there."""
    try:
        said = json.loads(" ".join(values)).items()
    except (ValueError, AttributeError):
        return [("columns", values)]  # already in our form
    fields: dict[str, str] = {}
    hidden: list[str] = []
    for column, field in said:
        if field in fields:
            raise ConfigError(
                f"--columns: {fields[field]!r} and {column!r} are both mapped to {field!r}. Name one of them."
            )
        if field in HIDES:
            hidden.append(column)
        else:
            fields[field] = column
    for column in hidden:
        if column in FIELDS and column not in fields:
            raise ConfigError(f"--columns: {column!r} is read if a row has it. Remove that column from the rows.")
    return [("columns", [f"{field}={column}" for field, column in fields.items()])] if fields else []


def _rpo(values: list[str]) -> Ours:
    """DPO plus a weighted loss on the better answer: two of TRL's losses."""
    if not values or values[0].lower() in ("none", "0", "0.0"):
        return []
    return [("loss_type", ["sigmoid", "sft"]), ("loss_weights", ["1", *values])]


def _thinking(values: list[str]) -> Ours:
    """A variable of templates that have it."""
    value = " ".join(values).lower()
    return [("template_variables", [f"enable_thinking={value or 'true'}"])] if value != "none" else []


TASKS = ("causal_lm", "seq_cls", "embedding", "reranker", "generative_reranker")


def _task(values: list[str]) -> Ours:
    name = " ".join(values).lower()
    if name not in (*TASKS, "none"):
        raise missing(f"--task-type {name}", f"it takes {', '.join(TASKS)}")
    return [("task", [name])] if name in TASKS else []


def _max_steps(values: list[str]) -> Ours:
    """transformers' -1 leaves it to the epochs."""
    return [("max_steps", values)] if values != ["-1"] else []


def _scale_rewards(values: list[str]) -> Ours:
    """It was yes or no before it named a group, as in TRL; GDPO scales the rewards of each function separately."""
    if " ".join(values).lower() == "gdpo":
        return [("trl_arguments", ["multi_objective_aggregation=normalize_then_sum"])]
    meant = {"true": "group", "false": "none"}
    return [("scale_rewards", [meant.get(value.lower(), value) for value in values])]


def _label_names(values: list[str]) -> Ours:
    """transformers' name of the label column, which is the same here; other values are our option for the labels'
    names."""
    return [("label_names", values)] if values != ["labels"] else []


def _use_template(values: list[str]) -> Ours:
    """Without a template, classifiers read plain text."""
    return [("plain", ["yes"])] if " ".join(values).lower() in ("false", "no", "0") else []


# ms-swift treats all towers as one.
TOWERS = {"llm": ["llm"], "vit": ["vision", "audio"], "aligner": ["aligner"]}


def _freeze(name: str, values: list[str]) -> Ours:
    frozen = is_on(values)
    return [("freeze", TOWERS[name])] if frozen else []


def _rate(name: str, values: list[str]) -> Ours:
    if not values or values[0].lower() == "none":
        return []
    return [("part_learning_rates", [f"{part}={values[0]}" for part in TOWERS[name]])]


# rlhf options under TRL's names.
OF_TRL = {
    "top_entropy_quantile": "top_entropy_quantile",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "ref_model_mixup_alpha": "ref_model_mixup_alpha",
    "center_rewards_coefficient": "center_rewards_coefficient",
    "f_divergence_type": "f_divergence_type",
    "ld_alpha": "ld_alpha",
    "discopop_tau": "discopop_tau",
}


RL = (*OF_TRL, "rpo_alpha", "scale_rewards")  # options of rlhf only


def _of_trl(name: str, values: list[str]) -> Ours:
    if not values or values[0].lower() == "none":
        return []
    return [("trl_arguments", [f"{name}={values[0]}"])]


def _tuner(values: list[str]) -> Ours:
    """LoRA on the language model with fully trained towers has its own name there."""
    if " ".join(values).lower() != "lora_llm":
        return [("tuner", values)]
    return [("tuner", ["lora"]), ("modules_to_save", [*TOWERS["vit"], *TOWERS["aligner"]])]


def _of_teacher(values: list[str]) -> Ours:
    """How the teacher alone is sharded and offloaded: stage 2 offloads the optimizer there, which a teacher lacks."""
    text = " ".join(values)
    if text not in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        raise missing(
            f"--teacher-deepspeed {text}",
            "use --model-stages teacher_model=3 and --model-offloads teacher_model=all",
        )
    kept = [("model_offloads", ["teacher_model=all"])] if text == "zero3_offload" else []
    return [("model_stages", [f"teacher_model={text[4]}"]), *kept]


def _kept_teacher(values: list[str]) -> Ours:
    asked = " ".join(values).lower() in ("", "true", "1", "yes")
    return [("model_offloads", ["teacher_model=all"])] if asked else []


# Options that several of ms-swift's contribute to.
ADDED = ("freeze", "part_learning_rates", "trl_arguments", "tuner_arguments", "optimizer_arguments", "modules_to_save")

NLG = ["rouge_l", "bleu"]
# Metrics that evaluations of embeddings and rerankers report in any case.
TOLD_ANYWAY = "infonce", "paired", "reranker"


def _metric(of_answers: Mapping[str, list[str]], values: list[str]) -> Ours:
    """The metrics of answers have other names there."""
    name = " ".join(values).lower()
    if name in ("none", *TOLD_ANYWAY):
        return []
    return [("answer_metrics", of_answers[name])] if name in of_answers else [("metrics", values)]


SPECIAL: dict[str, Callable[[list[str]], Ours]] = {
    "lr_scheduler_kwargs": _scheduler_kwargs,
    **{name: partial(_precision, name) for name in ("bf16", "fp16")},
    "gradient_checkpointing_kwargs": _checkpointing,
    "train_sampling_strategy": _sampling,
    "optim": _optim,
    "optimizer": _optimizer,
    "report_to": _report_to,
    "quant_bits": _bits,
    "save_total_limit": _save_limit,
    "fsdp": _fsdp,
    "init_weights": _init_weights,
    "sleep_level": _sleep,
    "columns": _columns,
    "rope_scaling": _rope,
    "loss_type": _loss_type,
    "loss_scale": _loss_scale,
    "agent_template": _agent,
    "enable_dft_loss": _dft,
    "rpo_alpha": _rpo,
    "enable_thinking": _thinking,
    "task_type": _task,
    "use_chat_template": _use_template,
    "label_names": _label_names,
    "max_steps": _max_steps,
    "eval_metric": partial(_metric, {"nlg": NLG}),
    "metric": partial(_metric, {"nlg": NLG, "rouge": NLG, "acc": ["exact_match"]}),  # infer's, too
    "scale_rewards": _scale_rewards,
    "model_kwargs": of_model_kwargs,
    "use_ray": ray.launcher,
    "device_groups": ray.processes,
    "teacher_deepspeed": _of_teacher,
    "offload_teacher_model": _kept_teacher,
    **{theirs: partial(_of_trl, trl) for theirs, trl in OF_TRL.items()},
    **{theirs: partial(of_tuner, name) for theirs, name in OF_TUNERS.items()},
    "use_galore": use_galore,
    **{theirs: partial(of_galore, name) for theirs, name in OF_GALORE.items()},
    **dict.fromkeys(("tuner_type", "train_type", "sft_type"), _tuner),
    **{f"freeze_{name}": partial(_freeze, name) for name in TOWERS},
    **{f"{name}_lr": partial(_rate, name) for name in ("vit", "aligner")},
}
