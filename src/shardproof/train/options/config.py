"""The options of a run: one model that the command line, a YAML file and the recipe share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from shardproof.train.options.batch import DEFAULT_MICRO_BATCH, Batch, batch_of
from shardproof.train.options.data_options import DataOptions
from shardproof.train.options.loss_options import LossOptions
from shardproof.train.options.option import (
    SAVE_STEPS,
    Arguments,
    Finite,
    ProblemType,
    Scheduler,
    Strategy,
    Task,
    Texts,
    Written,
    option,
)
from shardproof.train.options.times import Times

SELECTIVE = "selective"
EIGHT_BITS, MUON, GALORE, ADAFACTOR = "adamw_8bit", "muon", "galore", "adafactor"


class RunConfig(DataOptions, Times):
    """What every recipe needs to know, under the name it has everywhere.

    Attributes:
        command: of `shardproof` that runs it.
        sources: options that name a folder, a file or something on the hub.
    """

    model_config = ConfigDict(extra="forbid", validate_default=False)
    command: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = (
        *("model", "adapters", "dataset", "val_dataset", "cached_dataset", "cached_val_dataset"),
        *("media_root", "external_plugins"),
    )

    stage: int = option(
        "Sharding", 3, "what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too", ge=0, le=3
    )
    shard_group: int | None = option(
        "Sharding",
        None,
        "shard over groups of so many processes; each group has a whole copy (default: over all)",
        ge=1,
    )
    offload: str | None = option(
        "Sharding", None, "move to the host's memory: 'optimizer' (and masters) or 'all'; 'nvme:FOLDER': all, to files"
    )
    keep_gathered: Finite = option(
        "Sharding", 0.0, "with --stage 3: GB of gathered weights to keep on each process between uses", ge=0
    )
    nproc: int = option("Sharding", 1, "processes on this machine; with --launcher ray, in all", ge=1)
    launcher: Literal["local", "ray"] = option(
        "Sharding", "local", "who starts the processes: the command itself, or Ray Train on its cluster"
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Sharding", "fp32", "dtype to compute in (not given: bf16 on a GPU that has it); master weights stay fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = option(
        "Sharding",
        "fp32",
        "with --precision bf16: dtype in which gradients are added over processes; bf16 halves what is sent",
    )
    stochastic_rounding: bool = option(
        "Sharding", False, "with --precision bf16: no fp32 masters; all is bf16, and updates are rounded at random"
    )
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] | Literal["selective"] = option(
        "Sharding",
        False,
        "save memory by computing activations again in backward; 'selective': all but matrix products "
        "and attention; a number N: only in every N-th layer",
        values="yes|no|selective|N",
    )
    checkpointing_reentrant: bool = option("Sharding", False, "take the reentrant kind of gradient checkpointing")
    activation_offloading: bool = option(
        "Sharding", False, "keep activations in the host's memory between forward and backward"
    )

    nnodes: str | None = option(
        "Machines", None, "number of machines, or from MIN to MAX of them; give the same command on each", "N|MIN:MAX"
    )
    node_rank: int | None = option("Machines", None, "number of this machine, from 0", ge=0)
    master_addr: str | None = option("Machines", None, "name or address of machine 0")
    master_port: int | None = option("Machines", None, "a free port of machine 0 (default: 29500)", ge=1, le=65535)

    max_steps: int | None = option("Training", None, "stop after so many steps (default: as --epochs says)", ge=1)
    epochs: Finite = option("Training", 1.0, "passes over the data", gt=0)
    per_device_batch_size: int | None = option(
        "Training", None, f"rows a process holds at once (default: {DEFAULT_MICRO_BATCH}, or less)", ge=1
    )
    gradient_accumulation_steps: int | None = option("Training", None, "micro-batches per step (default: 1)", ge=1)
    global_batch_size: int | None = option(
        "Training", None, "rows per step, over all processes; sets the accumulation, whatever --nproc is", ge=1
    )
    group_by_length: bool = option(
        "Training", False, "make up each step of rows of similar length, which saves padding"
    )
    drop_last: bool = option("Training", False, "leave out the rows at the end of an epoch that fill no whole step")
    sequence_parallel: int = option(
        "Sharding", 1, "split each row over so many processes, for rows that are too long for one", ge=1
    )
    padding_free: bool = option(
        "Training", False, "lay the rows of a batch end to end in the decoder, which then computes no padding"
    )
    compile: bool = option("Training", False, "compile the blocks of the model with torch.compile")
    learning_rate: Finite = option("Training", 1e-4, "peak learning rate of AdamW", ge=0)
    lr_scheduler: Scheduler = option("Training", "cosine", "course of the learning rate after the warm-up")
    lr_scheduler_kwargs: dict[str, Finite] = option(
        "Training", {}, "further arguments of that schedule of transformers: min_lr=1e-6"
    )
    warmup_ratio: float = option("Training", 0.05, "share of the steps in which the learning rate warms up", ge=0, lt=1)
    warmup_steps: int | None = option("Training", None, "number of these steps, instead of a share", ge=0)
    weight_decay: Finite = option("Training", 0.0, "decoupled weight decay", ge=0)
    adam_beta1: float = option("Training", 0.9, "AdamW's beta1, of the mean of gradients", ge=0, lt=1)
    adam_beta2: float = option("Training", 0.999, "AdamW's beta2, of the mean of their squares", ge=0, lt=1)
    adam_epsilon: Finite = option("Training", 1e-8, "AdamW's epsilon", ge=0)
    lisa_activated_layers: int = option(
        "Training", 0, "train so many layers of the language model at a time, drawn by chance (LISA; 0: all)", ge=0
    )
    lisa_step_interval: int = option("Training", 20, "with that: draw others every so many steps", ge=1)
    max_grad_norm: Finite = option("Training", 1.0, "clip the global gradient norm to this; 0 does not clip", ge=0)
    seed: int = option("Training", 42, "seed of initial weights, the order of the rows and dropout", ge=0, lt=2**32)

    external_plugins: list[str] = option(
        "Plugins", [], "Python files of your own, run first; what they register can be named in the options below"
    )
    model_type: str | None = option(
        "Plugins", None, "load --model as this model of a plugin (default: as its config says)"
    )
    row_format: str | None = option(
        "Plugins", None, "a plugin's function that converts each row of the data into a known form"
    )
    optimizer: str = option(
        "Plugins", "adamw", "adamw, adamw_8bit (state in eight bits), muon, galore, adafactor, or a plugin's"
    )
    optimizer_arguments: Arguments = option(
        "Plugins", {}, "what such an optimizer takes, such as rank=64 (galore), momentum=0.9 (muon)"
    )
    callbacks: list[str] = option("Plugins", [], "plugins' callbacks, called on every rank while training")

    output_dir: str | None = option("Output", None, "folder of the run (default: a new one under runs/)")
    overwrite: bool = option("Output", False, "replace a run that lies in --output-dir")
    logging_steps: int = option("Output", 1, "log every so many steps, the mean over them", ge=1)
    eval_steps: int | None = option("Output", None, "evaluate every so many steps (default: at the end)", ge=1)
    eval_strategy: Strategy | None = option(
        "Output", None, f"evaluate every --eval-steps steps ({SAVE_STEPS}), after each pass over the data, or never"
    )
    eval_on_start: bool = option("Output", False, "evaluate before the first step, too")
    best_metric: str = option(
        "Output", "loss", "metric that evaluations are compared by: lower is better for a loss, higher for all else"
    )
    early_stop: int | None = option("Output", None, "stop after so many evaluations in a row without improvement", ge=1)
    keep_best: bool = option(
        "Output", False, "put the weights of the best evaluation in model/, not the last ones; each needs a checkpoint"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "Output", "auto", "dtype of the weights in model/; auto: the one the model came in, and fp32 for adapters"
    )
    save_steps: int | None = option(
        "Output", None, "write a checkpoint every so many steps, at the end and at Ctrl-C", ge=1
    )
    save_strategy: Strategy | None = option(
        "Output", None, f"write checkpoints every --save-steps steps ({SAVE_STEPS}), or after each pass over the data"
    )
    save_total_limit: int | None = option("Output", None, "keep the newest so many checkpoints (default: all)", ge=1)
    save_only_model: bool = option("Output", False, "checkpoints with weights only, from which no run can be resumed")
    resume: str | None = option(
        "Output", None, "continue from a checkpoint or a run folder; 'auto': from the newest in --output-dir, if any"
    )
    max_restarts: int = option(
        "Output", 0, "when a process dies, restart from the newest checkpoint, at most so many times", ge=0
    )
    min_processes: int | None = option(
        "Output", None, "restart without the processes that died, on so many at least (default: on as many)", ge=1
    )
    report_to: list[str] = option("Output", ["none"], "none, tensorboard, wandb, swanlab, mlflow, trackio")
    profile: int | None = option(
        "Output", None, "trace so many steps with torch's profiler, one file per process", ge=1
    )
    verbose: bool = option("Output", False, "show the messages of libraries, too")
    debug: bool = option("Output", False, "show tracebacks")

    @property
    def summary(self) -> str:
        """What is done with the model, in a few words."""
        return f"{self.tuner}, {self.precision}"

    @property
    def models(self) -> list[str]:
        """Every model that takes part."""
        return [self.model]

    @property
    def begins_with(self) -> str:
        """What says most about the model that training begins with: adapters that are trained on, or the model."""
        return self.adapters or self.model

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.learning_rate

    @property
    def holds_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        return bool(self.val_dataset or self.cached_val_dataset or self.val_split)

    @property
    def talks(self) -> bool:
        """Whether what comes out can be asked something."""
        return True

    @property
    def recipe(self) -> str:
        """The module of `shardproof.train` that does it."""
        return self.command

    @property
    def on_lost(self) -> Literal["skip", "stop"]:
        """What happens to a row whose file is lost: one of several ranks that share it cannot leave it out."""
        return "stop" if self.sequence_parallel > 1 else self.lost_files

    def batch(self, world_size: int) -> Batch:
        """How the rows of a step are dealt out to so many processes; see `batch_of`."""
        return batch_of(self, world_size)


class SftConfig(LossOptions, RunConfig):
    """Every option of a supervised fine-tuning run."""

    command = "sft"
    sources = (*RunConfig.sources, "token_weights")
    new_special_tokens: list[str] = option(
        "Model", [], "tokens to add to the model's vocabulary, or a .txt file with one a line"
    )
    new_blocks: int = option(
        "Model", 0, "add so many blocks to the language model, evenly spread, and train these alone (LLaMA-Pro)", ge=0
    )
    rope_scaling: Texts = option(
        "Model", {}, "scale rotary positions (RoPE) for longer inputs: type=yarn,factor=2 (or linear, dynamic)"
    )
    max_model_len: int | None = option(
        "Model", None, "longest input for the model, in tokens; a --rope-scaling without factor follows from it", ge=2
    )
    task: Task = option(
        "Task",
        "causal_lm",
        "learn to write answers, to label rows (a classifier, a regression), to embed texts, or to rank them",
    )
    num_labels: int | None = option("Task", None, "number of labels", ge=1)
    label_names: list[str] = option(
        "Task",
        [],
        "names of the labels in the order of their numbers, or a .txt file with one a line; instead of --num-labels",
    )
    problem_type: ProblemType | None = option(
        "Task",
        None,
        "one label per row, any number of them, or numbers to predict (default: one; regression if there is 1 label)",
    )
    plain: bool = option(
        "Task", False, "read rows as plain text, without a chat template: a question and its answer are joined"
    )
    pooling: Literal["last", "mean", "cls"] | None = option(
        "Task",
        None,
        "what becomes the embedding of a text: its last token, the mean, its first one (default: as the model does)",
    )
    loss_temperature: Finite | None = option(
        "Task",
        None,
        "temperature that similarities (infonce, default: 0.1) or scores (listwise, default: 1) are divided by",
        gt=0,
    )
    max_positives: int | None = option(
        "Task", None, "of a reranker: how many positives of a row each pass over the data draws (default: all)", ge=1
    )
    max_negatives: int | None = option("Task", None, "the same of negatives", ge=1)
    streaming: bool = option("Data", False, "read rows while training, block by block, instead of all before")
    shuffle_buffer_size: int = option(
        "Data", 1000, "with --streaming: rows per block; each block is shuffled in itself; 0 shuffles none", ge=0
    )
    max_epochs: int | None = option(
        "Data",
        None,
        "with --streaming: end behind so many passes over the rows, if --max-steps is not over before",
        ge=1,
    )
    row_cache: str | None = option(
        "Data", None, "keep what rows with files are encoded to in this folder, for the next run on any of them"
    )
    packing: bool = option(
        "Data", False, "put several rows into one of --max-length; attention does not cross from one to another"
    )
    fp8: bool = option(
        "Sharding", False, "with --precision bf16: matrix products of the model's blocks in fp8 (torchao)"
    )
    chunked_loss: bool = option(
        "Training", False, "never hold the logits of all tokens: compute the loss a part at a time"
    )
    liger_kernel: bool = option(
        "Training", False, "Liger's kernels on a GPU: norms, rotary embeddings, MLPs, a loss without whole logits"
    )
    deterministic: bool = option(
        "Training", False, "the same bits on any number of processes: gradients are added in one order, which is slower"
    )
    neftune_noise_alpha: Finite | None = option(
        "Training", None, "add noise of this strength to the embeddings of tokens in training (NEFTune)", gt=0
    )
    metrics: list[str] = option("Plugins", [], "plugins' metrics to compute in evaluations")
    predict_with_generate: bool = option(
        "Output", False, "in evaluations, have the model answer the rows, too, and say what the answers are worth"
    )
    answer_metrics: list[str] = option(
        "Output",
        [],
        "what that says: exact_match, accuracy (of the number at the end), rouge_l, bleu, chrf, or a plugin's"
        " (default: exact_match)",
    )
    max_new_tokens: int = option("Output", 128, "the longest of these answers in tokens", ge=1)
    stop_words: list[Written] = option("Output", [], "texts before which these answers end")

    @property
    def recipe(self) -> str:
        return {"causal_lm": self.command, "generative_reranker": "reranker"}.get(self.task, self.task)
