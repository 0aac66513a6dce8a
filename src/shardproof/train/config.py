"""The options of a run: one model that the command line, a YAML file and the recipe share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardproof.data.mixture import Stopping
from shardproof.train.batch import DEFAULT_MICRO_BATCH, Batch, batch_of
from shardproof.train.option import Finite, Names, option

SELECTIVE = "selective"
EIGHT_BITS, MUON, ADAFACTOR = "adamw_8bit", "muon", "adafactor"


Task = Literal["causal_lm", "seq_cls", "embedding", "reranker"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Scheduler = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]


class RunConfig(BaseModel):
    """What every recipe needs to know, under the name it has everywhere.

    Attributes:
        command: of `shardproof` that runs it.
        sources: options that name a folder, a file or something on the hub.
    """

    model_config = ConfigDict(extra="forbid", validate_default=False, protected_namespaces=())
    command: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = (
        *("model", "adapters", "dataset", "val_dataset", "media_root", "external_plugins"),
    )

    model: str = option(
        "Model",
        "",
        "folder or hub id of a model (MS::OWNER/NAME: of ModelScope's); 'tiny' builds a small Qwen3",
    )
    model_revision: str | None = option(
        "Model", None, "a branch, tag or commit of a model of the hub (default: its newest state)"
    )
    adapters: str | None = option(
        "Model", None, "train these LoRA adapters on: a run, or a folder of PEFT's; they say what --model is"
    )
    tuner: Literal["full", "lora"] = option("Model", "full", "train every weight, or LoRA adapters only")
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    lora_alpha: float = option("Model", 32.0, "scale of the adapters (alpha / rank)", gt=0)
    lora_dropout: float = option("Model", 0.0, "dropout in front of the adapters", ge=0, lt=1)
    rslora: bool = option("Model", False, "scale the adapters by alpha / sqrt(rank) (rsLoRA)")
    dora: bool = option("Model", False, "train the length of each row of a weight apart from its direction (DoRA)")
    quantize: Literal["nf4", "fp4"] | None = option(
        "Model", None, "with --tuner lora: keep the frozen weights of the language model's blocks in four bits (QLoRA)"
    )
    target_modules: list[str] = option(
        "Model",
        ["all-linear"],
        "modules that get adapters: names, or a regular expression of whole ones; 'all-linear' is all but the head",
    )
    modules_to_save: list[str] = option(
        "Model", [], "names of modules that are trained in full beside the adapters: embed_tokens, lm_head"
    )
    attn: str | None = option("Model", None, "attention: eager, sdpa, flash_attention_2, ... (default: the model's)")
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")

    freeze: Names = option("Parts", [], "parts that are not trained: llm, vision, audio, aligner, talker")
    train_parts: Names | None = option(
        "Parts", None, "parts that are trained; 'thinker' is all but the talker, and the default"
    )
    freeze_parameters: list[str] = option(
        "Parts", [], "parameters that are not trained either: regular expressions that are found in their names"
    )
    trainable_parameters: list[str] = option(
        "Parts", [], "parameters that are trained although an option above leaves them out, in the same form"
    )
    part_learning_rates: dict[str, Finite] = option(
        "Parts", {}, "peak learning rates of parts that have their own: vision=1e-5,aligner=2e-5"
    )
    enable_audio_output: bool | None = option(
        "Parts", None, "build and load the modules that speak, or leave them out (default: as the model's config says)"
    )

    dataset: list[str] = option(
        "Data", [], "JSONL, JSON, CSV, Parquet files, or OWNER/NAME on the hub, or 'stdlib'; X#1000: 1000 rows"
    )
    interleave_prob: list[Annotated[float, Field(gt=0, le=1)]] = option(
        "Data", [], "mix datasets: the share of the rows that each of --dataset has, 0.7 0.3 (default: all rows of all)"
    )
    stopping_strategy: Stopping = option(
        "Data", "first_exhausted", "with --interleave-prob: an epoch ends with the dataset that ends first, or last"
    )
    val_dataset: list[str] = option("Data", [], "files to evaluate on, in the same forms")
    val_split: float = option("Data", 0.0, "share of the rows to hold out for evaluation instead", ge=0, lt=1)
    columns: dict[str, str] = option(
        "Data", {}, "fields that have other names in the files: query=question,response=answer"
    )
    bad_rows: Literal["stop", "skip"] = option("Data", "stop", "a bad row stops the run, or is counted and listed")
    max_length: int = option("Data", 1024, "longest row in tokens", ge=2)
    truncation: Literal["drop", "right", "left", "raise"] = option(
        "Data", "drop", "longer rows are left out, lose their last or first tokens, or are an error"
    )
    system: str | None = option("Data", None, "system message for rows that have none")
    chat_template: str | None = option(
        "Data", None, "'chatml', a file with a Jinja template, or the template itself (default: the tokenizer's)"
    )
    template_variables: dict[str, str] = option(
        "Data", {}, "what the chat template finds set, here and in the model that comes out: enable_thinking=false"
    )

    media_root: str | None = option(
        "Media", None, "folder that pictures, sounds and videos lie in (default: that of the dataset file)"
    )
    allow_remote_media: bool = option(
        "Media", False, "fetch what rows name by http or https; without it such rows are bad"
    )
    remote_media_cache: str | None = option(
        "Media", None, "a folder that keeps what is fetched, so that each file is fetched once (default: at each use)"
    )
    max_pixels: int | None = option("Media", None, "scale larger pictures and frames down to so many pixels", ge=1)
    max_seconds: Finite = option("Media", 60.0, "longest sound or video; a longer one makes a bad row", gt=0)
    max_frames: int = option("Media", 16, "frames that are taken of a video, evenly spread", ge=1)
    lost_files: Literal["skip", "stop"] = option(
        "Media", "skip", "a file that is gone or changed in mid-training leaves its row out, or stops the run"
    )
    workers: int = option(
        "Media",
        2,
        "processes of each rank that read and decode in training (before it, as many as there are cores encode rows); "
        "0: all of it in one process",
        ge=0,
    )

    stage: int = option("Sharding", 3, "shard 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights", ge=0, le=3)
    shard_group: int | None = option(
        "Sharding", None, "so many processes hold a copy of the model between them (default: all hold one)", ge=1
    )
    offload: str | None = option(
        "Sharding", None, "keep in the host's memory 'optimizer' or 'all'; 'nvme:FOLDER': all, in files there"
    )
    keep_gathered: Finite = option(
        "Sharding",
        0.0,
        "with --stage 3: GB of gathered weights that stay on each process from one use to the next",
        ge=0,
    )
    nproc: int = option("Sharding", 1, "processes on this machine; with --launcher ray, in all", ge=1)
    launcher: Literal["local", "ray"] = option(
        "Sharding", "local", "who starts the processes: the command itself, or Ray Train on its cluster"
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Sharding", "fp32", "compute in this dtype (not given: bf16 on a GPU that has it); master weights stay fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = option(
        "Sharding",
        "fp32",
        "with --precision bf16: add gradients over processes in this dtype; bf16 halves what they send",
    )
    stochastic_rounding: bool = option(
        "Sharding", False, "with --precision bf16: no fp32 masters; weights, gradients and AdamW's state are bf16, too"
    )
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] | Literal["selective"] = option(
        "Sharding",
        False,
        "compute activations again in backward to save memory; 'selective': but for what matrix products and attention"
        " give; a number n: in every n-th layer",
        values="yes|no|selective|N",
    )
    checkpointing_reentrant: bool = option("Sharding", False, "the reentrant kind of it")
    activation_offloading: bool = option(
        "Sharding", False, "hold activations in the host's memory between forward and backward"
    )

    nnodes: str | None = option(
        "Machines",
        None,
        "so many machines, or from MIN to MAX of them, on each of which this command is given",
        "N|MIN:MAX",
    )
    node_rank: int | None = option("Machines", None, "which of them this is, from 0 on", ge=0)
    master_addr: str | None = option("Machines", None, "name or address of machine 0, where all meet")
    master_port: int | None = option("Machines", None, "a port that is free there (default: 29500)", ge=1, le=65535)

    max_steps: int | None = option("Training", None, "stop after so many steps (default: --epochs)", ge=1)
    epochs: Finite = option("Training", 1.0, "passes over the data", gt=0)
    per_device_batch_size: int | None = option(
        "Training", None, f"rows a process holds at once (default: {DEFAULT_MICRO_BATCH}, or less)", ge=1
    )
    gradient_accumulation_steps: int | None = option("Training", None, "micro-batches a step (default: 1)", ge=1)
    global_batch_size: int | None = option(
        "Training", None, "rows a step on all processes together; sets the accumulation, whatever --nproc is", ge=1
    )
    group_by_length: bool = option(
        "Training", False, "make up each step of rows of about one length, so that less of it is padding"
    )
    compile: bool = option("Training", False, "compile the blocks of the model with torch.compile")
    learning_rate: Finite = option("Training", 1e-4, "peak learning rate of AdamW", ge=0)
    lr_scheduler: Scheduler = option("Training", "cosine", "its course after the warm-up")
    lr_scheduler_kwargs: dict[str, Finite] = option(
        "Training", {}, "what transformers' schedule of that name takes besides: min_lr=1e-6"
    )
    warmup_ratio: float = option("Training", 0.05, "share of the steps to warm up", ge=0, lt=1)
    warmup_steps: int | None = option("Training", None, "so many steps to warm up, instead of a share", ge=0)
    weight_decay: Finite = option("Training", 0.0, "decoupled weight decay", ge=0)
    adam_beta1: float = option("Training", 0.9, "how much AdamW keeps of the mean of gradients", ge=0, lt=1)
    adam_beta2: float = option("Training", 0.999, "and of their squares", ge=0, lt=1)
    adam_epsilon: Finite = option("Training", 1e-8, "added to the root that AdamW divides by", ge=0)
    max_grad_norm: Finite = option("Training", 1.0, "clip the global gradient norm; 0 does not clip", ge=0)
    seed: int = option("Training", 42, "of the initial weights, the order of the rows and dropout", ge=0, lt=2**32)

    external_plugins: list[str] = option(
        "Plugins", [], "Python files of your own, run first, that register what the options below name"
    )
    model_type: str | None = option("Plugins", None, "load --model by this model (default: the one its config names)")
    row_format: str | None = option("Plugins", None, "bring each row of the data into a known form by this one")
    optimizer: str = option(
        "Plugins", "adamw", "adamw, adamw_8bit (state in eight bits), muon, adafactor, or a plugin's"
    )
    callbacks: list[str] = option("Plugins", [], "call these while training, on every rank")

    output_dir: str | None = option("Output", None, "folder of the run (default: a new one under runs/)")
    overwrite: bool = option("Output", False, "replace a run that lies in --output-dir")
    logging_steps: int = option("Output", 1, "log the mean over so many steps", ge=1)
    eval_steps: int | None = option("Output", None, "evaluate every so many steps (default: at the end)", ge=1)
    best_metric: str = option(
        "Output", "loss", "what an evaluation is judged by: the lower the better for a loss, the higher for all else"
    )
    early_stop: int | None = option(
        "Output", None, "end when so many evaluations in a row were no better than the best before", ge=1
    )
    keep_best: bool = option(
        "Output", False, "model/ gets the weights of the best evaluation, not the last; each of them has a checkpoint"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "Output", "auto", "of the weights in model/, not of checkpoints; auto: as the model came, and fp32 for adapters"
    )
    save_steps: int | None = option(
        "Output", None, "write a checkpoint to resume from every so many steps, at the end and at Ctrl-C", ge=1
    )
    save_total_limit: int | None = option("Output", None, "keep the newest so many checkpoints (default: all)", ge=1)
    save_only_model: bool = option("Output", False, "checkpoints of the weights alone, from which no run can go on")
    resume: str | None = option(
        "Output", None, "go on from a checkpoint or a run folder; 'auto': from the newest in --output-dir, if any"
    )
    max_restarts: int = option(
        "Output", 0, "when a process dies, go on from the newest checkpoint, so many times at most", ge=0
    )
    min_processes: int | None = option(
        "Output", None, "go on without the processes that died, on no fewer than so many (default: on as many)", ge=1
    )
    report_to: list[str] = option("Output", ["none"], "none, tensorboard, wandb")
    profile: int | None = option(
        "Output", None, "trace so many steps with torch's profiler, into a file of each process", ge=1
    )
    verbose: bool = option("Output", False, "show what the libraries below say, too")
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
    def talks(self) -> bool:
        """Whether what comes out can be asked something."""
        return True

    @property
    def recipe(self) -> str:
        """The module of `shardproof.train` that does it."""
        return self.command

    def batch(self, world_size: int) -> Batch:
        """How the rows of a step are dealt out to so many processes; see `batch_of`."""
        return batch_of(self, world_size)


class SftConfig(RunConfig):
    """Every option of a supervised fine-tuning run."""

    command = "sft"
    new_special_tokens: list[str] = option(
        "Model", [], "tokens that the model is to know besides, or a .txt file of them, one a line; embeddings grow"
    )
    rope_scaling: dict[str, str] = option(
        "Model", {}, "scale rotary positions for longer inputs: type=yarn,factor=2 (or linear, dynamic)"
    )
    max_model_len: int | None = option(
        "Model", None, "how many tokens the model can hold from now on, by its config; says the factor, too", ge=2
    )
    task: Task = option(
        "Task",
        "causal_lm",
        "learn to write answers, to give rows labels (a classifier, a regression), to embed texts, or to rank them",
    )
    num_labels: int | None = option("Task", None, "how many labels there are", ge=1)
    label_names: list[str] = option(
        "Task",
        [],
        "their names in the order of their numbers, or a .txt file of them, one a line; instead of --num-labels",
    )
    problem_type: ProblemType | None = option(
        "Task", None, "one label a row, any number of them, or numbers to predict (default: one; regression of 1 label)"
    )
    plain: bool = option("Task", False, "with --task seq_cls: rows are read as plain text, without a chat template")
    pooling: Literal["last", "mean", "cls"] | None = option(
        "Task", None, "what of a text is its embedding: its last token, the mean, its first one (default: the model's)"
    )
    loss_temperature: Finite | None = option(
        "Task",
        None,
        "with --loss infonce: similarities are divided by this (default: 0.1); with listwise: scores (1)",
        gt=0,
    )
    loss: str = option(
        "Data",
        "answer",
        "'answer' learns the answers, 'last_round' the last one, 'all' every token; or a plugin's; of embeddings "
        "infonce, cosine_similarity, contrastive; of a reranker pointwise, listwise",
    )
    loss_type: Literal["nll", "dft"] = option(
        "Data", "nll", "the log-likelihood of what is learnt, or, with 'dft', each token's times its probability (DFT)"
    )
    label_smoothing_factor: float = option(
        "Data",
        0.0,
        "share of the loss that asks for all tokens alike instead of the right one (label smoothing)",
        ge=0,
        lt=1,
    )
    streaming: bool = option(
        "Data", False, "read rows while training, a block of them at a time, instead of all of them before"
    )
    shuffle_buffer_size: int = option(
        "Data", 1000, "with --streaming: rows of a block, which are shuffled among themselves; 0 shuffles none", ge=0
    )
    packing: bool = option("Data", False, "fill rows up to --max-length with others, none of which sees another")
    sequence_parallel: int = option(
        "Sharding", 1, "so many processes share each row and hold a part of it, for rows too long for one", ge=1
    )
    fp8: bool = option("Sharding", False, "with --precision bf16: multiply in fp8 in the blocks of the model (torchao)")
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
    metrics: list[str] = option("Plugins", [], "compute these, too, in an evaluation")

    @property
    def recipe(self) -> str:
        return self.command if self.task == "causal_lm" else self.task
