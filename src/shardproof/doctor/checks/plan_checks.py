"""Whether a run fits: the plan for exactly its stage, processes and rows, and for the models besides the trained
one."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.doctor.checks.check import Check
from shardproof.doctor.checks.machine import nearest
from shardproof.doctor.config import DoctorConfig, PlanConfig, RlhfDoctorConfig
from shardproof.doctor.planning.subject import ROWS_ARE_TEXT
from shardproof.errors import ConfigError, DataError
from shardproof.models.families.family import CAUSAL
from shardproof.models.scorers import SCORER
from shardproof.train.options.rlhf_config import PAIRED, REFERRED, REWARDED
from shardproof.train.run import recipe_of
from shardproof.train.seq_cls.labelling import labels_of

if TYPE_CHECKING:
    from shardproof.doctor.planning.imagine import Loss
    from shardproof.doctor.planning.plan import Candidate
    from shardproof.doctor.planning.sample import Sample
    from shardproof.train.options.config import Batch

OTHERWISE = {"stage", "offload", "gradient_checkpointing", "per_device_batch_size", "max_length"}  # lists in a plan
ALONE = """import pickle, sys
from shardproof.doctor.checks.plan_checks import held
with open(sys.argv[1], "rb") as question, open(sys.argv[2], "wb") as answer:
    pickle.dump(held(*pickle.load(question)), answer)
"""


@dataclass(frozen=True)
class Held:
    """The memory that a process of a run uses.

    Attributes:
        candidate: for the trained model, in a step.
        others: further bytes, by purpose.
        writing: bytes of the trained model while it generates answers; 0 if it does not.
        notes: what the numbers leave out.
    """

    candidate: Candidate
    others: dict[str, float]
    writing: float
    notes: Sequence[str] = ()

    @property
    def besides(self) -> float:
        return sum(self.others.values())

    @property
    def peak(self) -> float:
        return max(self.candidate.peak, self.writing) + self.besides


def memory(
    config: DoctorConfig | RlhfDoctorConfig, batch: Batch, source: str, encoded: Any, processing: Any = None
) -> list[Check]:
    """One check: the peak memory of a process, of what is available."""
    from shardproof.zero.device import default_device, free_memory

    if config.model_type:  # may be another model than its config says
        seen = f"unknown: plan supports transformers models, but --model-type {config.model_type} is a plugin's"
        return [Check("plan", "memory", "warn", seen, "The model cannot be planned.")]
    there = config.memory * 1e9 if config.memory else free_memory(default_device(), config.nproc)
    length = length_of(config, encoded)
    if config.recipe in ("embedding", "reranker"):  # all texts of a row pass through the model at once
        texts = encoded.report.most if encoded is not None else 2
        most = [getattr(config, name, None) or texts for name in ("max_positives", "max_negatives")]
        texts = min(texts, sum(most))
        batch = batch.model_copy(update={"micro": batch.micro * texts})
    asked = plan_of(config, batch, source, length, max(there, 1) / 1e9)
    experts = experts_of(config, processing)
    try:
        found = _counted(config, asked, batch, encoded, processing, experts)
    except Exception as error:  # a plugin's model, or one that needs values: no reason to stop
        seen = f"unknown: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Check("plan", "memory", "warn", seen, "The model cannot be planned.")]
    rows = f"{batch.micro} row(s) of {length} tokens"
    if experts:
        rows += f" and {config.chord_sft_per_device_train_batch_size} expert row(s) of {experts}"  # type: ignore[union-attr]
    judgement = judged(config, rows, found, there)
    return [judgement, *([] if config.memory else room_elsewhere(config, batch, found.candidate))]


def _counted(config: Any, asked: PlanConfig, batch: Batch, encoded: Any, processing: Any, experts: int) -> Held:
    """The memory with the files of rows, if it can be computed: without values, the sizes in some models are unknown.
    The notes then say why."""
    try:
        if found := _with_files(config, asked, batch, encoded, processing, experts):
            return found
        rows = ROWS_ARE_TEXT
    except ConfigError as error:
        rows = f"the files of its rows are not counted ({' '.join(str(error).split()).removesuffix('.')})"
    found = held_apart(config, asked, batch, None, experts)
    return replace(found, notes=[note.replace(ROWS_ARE_TEXT, rows) for note in found.notes])


def _with_files(
    config: Any, asked: PlanConfig, batch: Batch, encoded: Any, processing: Any, experts: int
) -> Held | None:
    """The memory if each row has the files of the heaviest one; None if rows are text.

    Raises:
        ConfigError: the files' path through the model depends on values.
    """
    from shardproof.data.encoding.pack import PackedMediaRows
    from shardproof.data.media.rows import MediaRows
    from shardproof.doctor.planning.sample import Joined, heaviest, longest
    from shardproof.train.rlhf.pictures import are_pictured

    paired = isinstance(config, RlhfDoctorConfig) and encoded is not None and are_pictured(encoded)
    packed = isinstance(encoded, PackedMediaRows)
    if not (paired or packed or isinstance(encoded, MediaRows)):
        return None
    recipe: Any = recipe_of(config)
    if packed:  # each counts as one row, whose loss is computed without the logits
        encoded, asked = Joined(encoded), asked.model_copy(update={"packing": False, "chunked_loss": True})
    sample = longest(encoded) if paired else heaviest(encoded, recipe.media_encoder(config, processing))
    return held_apart(config, asked, batch, sample, experts) if sample else None


def held_apart(
    config: DoctorConfig | RlhfDoctorConfig,
    asked: PlanConfig,
    batch: Batch,
    sample: Sample | None = None,
    experts: int = 0,
) -> Held:
    """`held`, in a separate process if this one is already a rank (of several machines), since a plan simulates
    ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return held(config, asked, batch, sample, experts)
    with tempfile.TemporaryDirectory(prefix="shardproof-plan-") as folder:
        question, answer = Path(folder, "question"), Path(folder, "answer")
        question.write_bytes(pickle.dumps((config, asked, batch, sample, experts)))
        run = [sys.executable, "-c", ALONE, str(question), str(answer)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError((done.stderr.strip() or "no message").splitlines()[-1])
        found: Held = pickle.loads(answer.read_bytes())
        return found


def held(
    config: DoctorConfig | RlhfDoctorConfig,
    asked: PlanConfig,
    batch: Batch,
    sample: Sample | None = None,
    experts: int = 0,
) -> Held:
    """`asked`: the run as options of plan; `sample`: the row that stands for all, see `Rank`; `experts`: tokens of a
    row for CHORD."""
    from shardproof.doctor.planning.others import beside
    from shardproof.doctor.planning.plan import loss_of, make_plan

    if not isinstance(config, RlhfDoctorConfig):
        plan = make_plan(asked, *loss_of(asked), sample)
        return Held(plan.candidates[0], {}, 0.0, plan.notes)
    auto, loss = loss_of_rlhf(config, experts)
    plan, others = make_plan(asked, auto, loss, sample), beside(config, asked, asked.model)
    return Held(plan.candidates[0], others, writing_of(config, batch, asked), plan.notes)


def experts_of(config: Any, processing: Any) -> int:
    """Tokens of the longest row of --chord-sft-dataset, or the maximum for one; 0 if there are none."""
    from shardproof.train.model.loading import tokenizer_of
    from shardproof.train.rlhf.chord import encoded_experts, room_of_experts

    if not getattr(config, "chord_sft_dataset", None):
        return 0
    try:
        return max(map(len, encoded_experts(config, tokenizer_of(processing))["input_ids"]))
    except (ConfigError, DataError):  # the trial reports it
        return room_of_experts(config)


def loss_of_rlhf(config: RlhfDoctorConfig, experts: int) -> tuple[str, Loss]:
    """The transformers class and the loss of an rlhf run, as arguments of `make_plan`."""
    from shardproof.doctor.planning.stand_ins import Taught, WithExperts

    if config.chord_sft_dataset:
        return CAUSAL, WithExperts(config.chord_sft_per_device_train_batch_size, experts)
    if config.rlhf_type in REFERRED:
        return CAUSAL, "fused"
    if config.rlhf_type == "rm":
        return SCORER, "scores"
    if config.rlhf_type == "gkd" and config.gkd_logits_topk:
        return CAUSAL, Taught(config.gkd_logits_topk, bool(config.sft_alpha))
    if config.rlhf_type == "gkd":
        return CAUSAL, "distilled and written" if config.sft_alpha else "distilled"
    alpha = {"orpo": 1.0, "cpo": 1.0, "simpo": 0.0}[config.rlhf_type] if config.cpo_alpha is None else config.cpo_alpha
    return CAUSAL, "contrasted and written" if alpha else "contrasted"


def judged(config: DoctorConfig | RlhfDoctorConfig, rows: str, found: Held, there: float) -> Check:
    peak, candidate = found.peak, found.candidate
    seen = f"{peak / 1e9:.2f} of {there / 1e9:.2f} GB per process, {rows}"
    seen += "".join(f"; {size / 1e9:.2f} of it for {what}" for what, size in found.others.items())
    seen += f"; {(found.writing + found.besides) / 1e9:.2f} while answers are generated" if found.writing else ""
    seen += f"; {candidate.home / 1e9:.2f} GB elsewhere (--offload {config.offload})" if candidate.home else ""
    seen += f"; {candidate.kept / 1e9:.2f} GB of activations on the host" if candidate.kept else ""
    seen += "".join(f". {note.removesuffix('.')}" for note in found.notes)
    if peak > there:
        option = "shardproof plan shows what fits: --stage 3, --gradient-checkpointing, --per-device-batch-size 1"
        return Check("plan", "memory", "fail", seen, "The run would run out of memory.", option)
    if peak > 0.9 * there:
        why = "Little memory is left for anything other than tensors."
        return Check("plan", "memory", "warn", seen, why, "--gradient-checkpointing")
    return Check("plan", "memory", "ok", seen)


def room_elsewhere(config: DoctorConfig | RlhfDoctorConfig, batch: Batch, candidate: Candidate) -> list[Check]:
    """Checks that fail if this machine lacks host memory or disk space for what its processes keep off their
    devices."""
    from shardproof.zero.device import host_memory

    processes = max(1, batch.world_size // machines_of(config))
    rooms = [("memory of the host", candidate.on_host, host_memory())]
    if candidate.on_disk:
        place = nearest(str(config.offload).partition(":")[2])
        rooms.append((f"disk of {place}", candidate.on_disk, shutil.disk_usage(place).free))
    found = []
    for name, needed, free in rooms:
        if free and processes * needed > free:
            seen = (
                f"{processes * needed / 1e9:.2f} GB for {processes} process(es), but only {free / 1e9:.2f} GB are free"
            )
            why = "The run would end once there is no room for offloaded data."
            option = "--tuner lora, --optimizer adamw_8bit, or more machines"
            option = option if candidate.on_disk else f"--offload nvme:FOLDER on a large disk, {option}"
            found.append(Check("plan", name, "fail", seen, why, option))
    return found


def machines_of(config: DoctorConfig | RlhfDoctorConfig) -> int:
    """The minimum number of machines of a run."""
    return int(str(config.nnodes or 1).partition(":")[0])


def plan_of(config: Any, batch: Batch, source: str, length: int, memory: float) -> PlanConfig:
    """A run as options of `shardproof plan`, which has many of the same."""
    import torch

    shared = (PlanConfig.model_fields.keys() & type(config).model_fields.keys()) - OTHERWISE
    on_cpu = not torch.accelerator.is_available()
    elsewhere: Any = (config.offload or "none").partition(":")[0]
    paired = isinstance(config, RlhfDoctorConfig) and config.rlhf_type in PAIRED
    machines, world = machines_of(config), batch.world_size
    whole = config.shard_group == 1  # then a process holds everything, as at stage 0
    labelled = config.recipe == "seq_cls"
    own: dict[str, Any] = {
        "model": source,
        **({"num_labels": len(labels_of(config).names)} if labelled else {}),
        "gpus": [world],
        "nodes": 1 if world % machines else machines,
        "shard_group": None if whole else config.shard_group,
        "gpu_memory": memory,
        "device": "cpu" if on_cpu else "gpu",
        "stage": "0" if whole else str(config.stage),
        "offload": ["none" if on_cpu and elsewhere != "nvme" else elsewhere],
        "gradient_checkpointing": [config.gradient_checkpointing],
        "per_device_batch_size": [batch.micro * (1 + paired)],  # both answers pass through the model together
        "gradient_accumulation_steps": batch.accumulation,
        "max_length": [length],
    }
    return PlanConfig(**{name: getattr(config, name) for name in shared} | own)


def length_of(config: Any, encoded: Any) -> int:
    """Tokens of the longest row, or the maximum."""
    longest = config.max_length
    if config.recipe in ("seq_cls", "embedding", "reranker") and encoded is not None:
        longest = encoded.report.limit or longest
    if encoded is not None and not getattr(config, "packing", False):
        longest = min(longest, max(getattr(encoded.report, "longest", 0), 2))
    return longest + (config.max_completion_length if generates(config, with_server=True) else 0)


def generates(config: Any, with_server: bool = False) -> bool:
    """Whether the run generates answers, by itself or `with_server`."""
    if not isinstance(config, RlhfDoctorConfig):
        return False
    if config.rlhf_type == "gkd":
        return config.seq_kd or (config.lmbda > 0 and (with_server or not config.use_vllm))
    if config.rlhf_type not in REWARDED:
        return False
    return with_server or not config.use_vllm


def writing_of(config: Any, batch: Batch, asked: PlanConfig) -> float:
    """Bytes of the trained model while answers are generated; 0 if it generates none."""
    from shardproof.doctor.planning.others import while_writing

    if not generates(config):
        return 0.0
    steps = 1 if config.rlhf_type == "gkd" else config.steps_per_generation or batch.accumulation
    at_once = batch.micro * steps // batch.sequence  # each of the ranks that share rows generates a part
    return while_writing(asked, at_once, asked.max_length[0] - config.max_completion_length)
