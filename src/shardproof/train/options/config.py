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
    """The options of every recipe, under the names they have everywhere.

    Attributes:
        command: the `shardproof` command that runs it.
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
        "shard within groups of this many processes; each group holds a full copy (default: one group of all)",
        ge=1,
    )
    offload: str | None = option(
        "Sharding",
        None,
        "move to host memory: 'optimizer' (state and master weights) or 'all'; 'nvme:FOLDER' moves all to files",
    )
    keep_gathered: Finite = option(
        "Sharding", 0.0, "with --stage 3: GB of gathered weights that each process keeps between uses", ge=0
    )
    nproc: int = option("Sharding", 1, "processes on this machine; with --launcher ray, in all", ge=1)
    launcher: Literal["local", "ray"] = option(
        "Sharding", "local", "what starts the processes: the command itself, or Ray Train on its cluster"
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Sharding", "fp32", "dtype for computing (if not given: bf16 on GPUs that support it); master weights stay fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = option(
        "Sharding",
        "fp32",
        "with --precision bf16: dtype in which gradients are reduced across processes; bf16 halves the traffic",
    )
    stochastic_rounding: bool = option(
        "Sharding",
        False,
        "with --precision bf16: no fp32 master weights; everything is bf16, and updates are rounded stochastically",
    )
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] | Literal["selective"] = option(
        "Sharding",
        False,
        "save memory by recomputing activations in backward; 'selective': all but matrix products "
        "and attention; a number N: only in every N-th layer",
        values="yes|no|selective|N",
    )
    checkpointing_reentrant: bool = option("Sharding", False, "use the reentrant variant of gradient checkpointing")
    activation_offloading: bool = option(
        "Sharding", False, "keep activations in host memory between forward and backward"
    )

    nnodes: str | None = option(
        "Machines", None, "number of machines, or a range MIN:MAX; run the same command on each", "N|MIN:MAX"
    )
    node_rank: int | None = option("Machines", None, "number of this machine, from 0", ge=0)
    master_addr: str | None = option("Machines", None, "name or address of machine 0")
    master_port: int | None = option("Machines", None, "a free port of machine 0 (default: 29500)", ge=1, le=65535)

    max_steps: int | None = option(
        "Training", None, "stop after this many steps (default: what --epochs amounts to)", ge=1
    )
    epochs: Finite = option("Training", 1.0, "passes over the data", gt=0)
    per_device_batch_size: int | None = option(
        "Training", None, f"rows a process holds at once (default: {DEFAULT_MICRO_BATCH}, or less)", ge=1
    )
    gradient_accumulation_steps: int | None = option("Training", None, "micro-batches per step (default: 1)", ge=1)
    global_batch_size: int | None = option(
        "Training",
        None,
        "rows per step over all processes; the accumulation follows from it, whatever --nproc is",
        ge=1,
    )
    group_by_length: bool = option("Training", False, "fill each step with rows of similar length, which saves padding")
    drop_last: bool = option("Training", False, "drop the rows at the end of an epoch that do not fill a step")
    sequence_parallel: int = option(
        "Sharding", 1, "split each row across this many processes, for rows that are too long for one", ge=1
    )
    padding_free: bool = option(
        "Training", False, "concatenate the rows of a batch in the decoder, so that no padding is computed"
    )
    compile: bool = option("Training", False, "compile the blocks of the model with torch.compile")
    learning_rate: Finite = option("Training", 1e-4, "peak learning rate of AdamW", ge=0)
    lr_scheduler: Scheduler = option("Training", "cosine", "learning rate schedule after the warm-up")
    lr_scheduler_kwargs: dict[str, Finite] = option(
        "Training", {}, "further arguments for that schedule (transformers): min_lr=1e-6"
    )
    warmup_ratio: float = option("Training", 0.05, "share of the steps in which the learning rate warms up", ge=0, lt=1)
    warmup_steps: int | None = option("Training", None, "number of warm-up steps, instead of a share", ge=0)
    weight_decay: Finite = option("Training", 0.0, "decoupled weight decay", ge=0)
    adam_beta1: float = option("Training", 0.9, "AdamW's beta1 (running mean of gradients)", ge=0, lt=1)
    adam_beta2: float = option("Training", 0.999, "AdamW's beta2 (running mean of their squares)", ge=0, lt=1)
    adam_epsilon: Finite = option("Training", 1e-8, "AdamW's epsilon", ge=0)
    lisa_activated_layers: int = option(
        "Training", 0, "train this many randomly chosen layers of the language model at a time (LISA; 0: all)", ge=0
    )
    lisa_step_interval: int = option("Training", 20, "with LISA: choose new layers every this many steps", ge=1)
    max_grad_norm: Finite = option("Training", 1.0, "clip the global gradient norm to this; 0 does not clip", ge=0)
    seed: int = option("Training", 42, "seed of initial weights, the order of the rows and dropout", ge=0, lt=2**32)

    external_plugins: list[str] = option(
        "Plugins", [], "your own Python files, run first; the options below can name what they register"
    )
    model_type: str | None = option(
        "Plugins", None, "load --model as this plugin model (default: what its config says)"
    )
    row_format: str | None = option("Plugins", None, "a plugin function that converts each row into a known form")
    optimizer: str = option(
        "Plugins", "adamw", "adamw, adamw_8bit (8-bit state), muon, galore, adafactor, or a plugin's"
    )
    optimizer_arguments: Arguments = option(
        "Plugins", {}, "arguments for the optimizer, such as rank=64 (galore) or momentum=0.9 (muon)"
    )
    callbacks: list[str] = option("Plugins", [], "plugin callbacks, called on every rank during training")

    output_dir: str | None = option("Output", None, "folder for the run (default: a new one under runs/)")
    overwrite: bool = option("Output", False, "replace the run that is already in --output-dir")
    logging_steps: int = option("Output", 1, "log every this many steps, averaged over them", ge=1)
    eval_steps: int | None = option("Output", None, "evaluate every this many steps (default: at the end)", ge=1)
    eval_strategy: Strategy | None = option(
        "Output", None, f"evaluate every --eval-steps steps ({SAVE_STEPS}), after each pass over the data, or never"
    )
    eval_on_start: bool = option("Output", False, "also evaluate before the first step")
    best_metric: str = option(
        "Output", "loss", "metric for comparing evaluations: lower is better for losses, higher for everything else"
    )
    early_stop: int | None = option(
        "Output", None, "stop after this many evaluations in a row without improvement", ge=1
    )
    keep_best: bool = option(
        "Output",
        False,
        "save the weights of the best evaluation to model/, not the last ones; each evaluation needs a checkpoint",
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "Output", "auto", "dtype of the weights in model/; auto: that of the original model, fp32 for adapters"
    )
    save_steps: int | None = option(
        "Output", None, "write a checkpoint every this many steps, at the end and on Ctrl-C", ge=1
    )
    save_strategy: Strategy | None = option(
        "Output", None, f"write checkpoints every --save-steps steps ({SAVE_STEPS}), or after each pass over the data"
    )
    save_total_limit: int | None = option(
        "Output", None, "keep only this many of the newest checkpoints (default: all)", ge=1
    )
    save_only_model: bool = option(
        "Output", False, "save only weights in checkpoints; runs cannot be resumed from them"
    )
    resume: str | None = option(
        "Output", None, "continue from a checkpoint or a run folder; 'auto': from the newest in --output-dir, if any"
    )
    max_restarts: int = option(
        "Output", 0, "when a process dies, restart from the newest checkpoint, at most this many times", ge=0
    )
    min_processes: int | None = option(
        "Output", None, "allow restarts with fewer processes, but at least this many (default: as many as before)", ge=1
    )
    report_to: list[str] = option("Output", ["none"], "none, tensorboard, wandb, swanlab, mlflow, trackio")
    profile: int | None = option(
        "Output", None, "trace this many steps with torch's profiler, one file per process", ge=1
    )
    verbose: bool = option("Output", False, "also show messages of libraries")
    debug: bool = option("Output", False, "show tracebacks")

    @property
    def summary(self) -> str:
        """What is done with the model, in a few words."""
        return f"{self.tuner}, {self.precision}"

    @property
    def models(self) -> list[str]:
        """All models of the run."""
        return [self.model]

    @property
    def begins_with(self) -> str:
        """The adapters that training continues from, or else the model."""
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
        """Whether the trained model can be asked questions."""
        return True

    @property
    def recipe(self) -> str:
        """The module of `shardproof.train` that runs it."""
        return self.command

    @property
    def on_lost(self) -> Literal["skip", "stop"]:
        """What happens to a row whose file is lost. Where ranks share a row, a single one of them cannot skip it."""
        return "stop" if self.sequence_parallel > 1 else self.lost_files

    def batch(self, world_size: int) -> Batch:
        """How the rows of a step are distributed to this number of processes; see `batch_of`."""
        return batch_of(self, world_size)


class SftConfig(LossOptions, RunConfig):
    """Every option of a supervised fine-tuning run."""

    command = "sft"
    sources = (*RunConfig.sources, "token_weights")
    new_special_tokens: list[str] = option(
        "Model", [], "tokens to add to the vocabulary, or a .txt file with one per line"
    )
    new_blocks: int = option(
        "Model", 0, "add this many blocks to the language model, evenly spread, and train only them (LLaMA-Pro)", ge=0
    )
    rope_scaling: Texts = option(
        "Model", {}, "scale rotary positions (RoPE) for longer inputs: type=yarn,factor=2 (or linear, dynamic)"
    )
    max_model_len: int | None = option(
        "Model", None, "longest input of the model in tokens; gives --rope-scaling its factor if it has none", ge=2
    )
    task: Task = option(
        "Task",
        "causal_lm",
        "learn to write answers, to label rows (classification, regression), to embed texts, or to rank them",
    )
    num_labels: int | None = option("Task", None, "number of labels", ge=1)
    label_names: list[str] = option(
        "Task",
        [],
        "names of the labels in the order of their numbers, or a .txt file with one per line; replaces --num-labels",
    )
    problem_type: ProblemType | None = option(
        "Task",
        None,
        "one label per row, any number of them, or numbers to predict (default: one; regression if there is 1 label)",
    )
    plain: bool = option(
        "Task", False, "read rows as plain text, without a chat template: question and answer are concatenated"
    )
    pooling: Literal["last", "mean", "cls"] | None = option(
        "Task",
        None,
        "how a text is embedded: its last token, the mean over tokens, or its first one (default: as the model does)",
    )
    loss_temperature: Finite | None = option(
        "Task",
        None,
        "temperature by which similarities (infonce, default: 0.1) or scores (listwise, default: 1) are divided",
        gt=0,
    )
    max_positives: int | None = option(
        "Task", None, "for rerankers: positives drawn per row in each pass over the data (default: all)", ge=1
    )
    max_negatives: int | None = option("Task", None, "for rerankers: negatives drawn per row (default: all)", ge=1)
    streaming: bool = option("Data", False, "read rows block by block during training, instead of all of them before")
    shuffle_buffer_size: int = option(
        "Data", 1000, "with --streaming: rows per block; rows are shuffled within a block; 0: not shuffled", ge=0
    )
    max_epochs: int | None = option(
        "Data",
        None,
        "with --streaming: end after this many passes over the rows, or at --max-steps, whichever is first",
        ge=1,
    )
    row_cache: str | None = option("Data", None, "folder in which encoded rows with files are cached for later runs")
    packing: bool = option(
        "Data", False, "pack several rows into one of --max-length; attention does not cross row boundaries"
    )
    fp8: bool = option(
        "Sharding", False, "with --precision bf16: matrix products of the model's blocks in fp8 (torchao)"
    )
    chunked_loss: bool = option(
        "Training", False, "compute the loss in chunks, so that the logits of all tokens are never held at once"
    )
    liger_kernel: bool = option(
        "Training", False, "use Liger kernels on a GPU: norms, rotary embeddings, MLPs, fused loss"
    )
    deterministic: bool = option(
        "Training", False, "same bits on any number of processes: gradients are added in a fixed order, which is slower"
    )
    neftune_noise_alpha: Finite | None = option(
        "Training", None, "add noise of this strength to token embeddings in training (NEFTune)", gt=0
    )
    metrics: list[str] = option("Plugins", [], "plugin metrics to compute in evaluations")
    predict_with_generate: bool = option(
        "Output", False, "in evaluations, also generate answers to the rows and score them"
    )
    answer_metrics: list[str] = option(
        "Output",
        [],
        "scores for these answers: exact_match, accuracy (of the final number), rouge_l, bleu, chrf, or a plugin's"
        " (default: exact_match)",
    )
    max_new_tokens: int = option("Output", 128, "longest generated answer in tokens", ge=1)
    stop_words: list[Written] = option("Output", [], "strings at which generated answers end")

    @property
    def recipe(self) -> str:
        return {"causal_lm": self.command, "generative_reranker": "reranker"}.get(self.task, self.task)
