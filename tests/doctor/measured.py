"""What a rank really holds and moves in a step: what `stats` tells, and every byte of torch's CPU allocator."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import shardproof
from shardproof.data.forms.labels import Labels
from shardproof.doctor.config import PlanConfig, RlhfDoctorConfig
from shardproof.doctor.planning.sample import described
from shardproof.doctor.planning.subject import recipe_for
from shardproof.integrations.prepared import hold_as_computed, hybrid_mesh, shard_prepared
from shardproof.models.forward import makes_its_mean
from shardproof.models.loading.classes import load_pretrained
from shardproof.parallel.sequence import SequenceParallel
from shardproof.train.adapters.adding import with_adapters
from shardproof.train.embedding.pooling import pooled
from shardproof.train.embedding.recipe import ADAPTED
from shardproof.train.embedding.similarity import Embedded, infonce
from shardproof.train.losses.shortcuts import chunked_loss
from shardproof.train.losses.tokens import token_mean
from shardproof.train.model.activations import choose_checkpointing
from shardproof.train.model.new_blocks import add_blocks
from shardproof.train.model.parts import in_bits
from shardproof.train.model.shared_rows import share_rows_of, shared_rows_of
from shardproof.train.optim import optimizers
from shardproof.train.optim.optimizers import made_by
from shardproof.train.reranker import ranking
from shardproof.train.reranker.scoring import YesNo, last_logits_only
from shardproof.train.seq_cls.measures import LabelLoss
from shardproof.train.settings import mixed_precision

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory import Ledger, no_chatter, storages

from shardproof.models.checkpointing import enable_checkpointing


def held_and_moved(config: PlanConfig) -> dict[str, float]:
    """Bytes on this rank in two steps of a run of the options of `config`, one value of each; the peak on rank 0 only.

    Once in a process: the profiler does not bear being started again and again, and of a model before this one
    something may go in mid-step.
    """
    ledger = Ledger(0) if dist.get_rank() == 0 else None
    stage, micros = int(config.stage), config.gradient_accumulation_steps
    with no_chatter(), ledger or contextlib.nullcontext():
        model, sequence = made(config)
        precision = None if config.stochastic_rounding else mixed_precision(config.precision, config.reduce_dtype)
        if config.tuner != "full":
            hold_as_computed(model, precision)
        buffers = storages(model.buffers())  # those of adapters are held as weights are
        mesh = hybrid_mesh(config.shard_group, torch.device("cpu"))
        model = shard_prepared(model, stage, precision, None, mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = made_by(optimizer_of(config), [{"params": trained}], 1e-4, model)
        note(ledger, "sharded")
        for _ in range(2):
            before, sent = shardproof.stats(model).total, sequence.bytes_sent if sequence else 0
            for number in range(micros):
                quiet = stage < 2 and number < micros - 1
                with (
                    shardproof.no_sync(model) if quiet else contextlib.nullcontext(),
                    sequence or contextlib.nullcontext(),
                ):
                    loss_of(config, model, sequence).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients = storages(p.grad.local for p in trained if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()  # else a cycle that Python has not found yet may keep a buffer from being used again
        note(ledger, "trained")
    total = shardproof.stats(model).total
    weights = storages(p.detach().local for p in model.parameters()) + buffers
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {
        "weights": weights,
        "optimizer": storages(states),
        "gradients": gradients,
        "moved": total.bytes_gathered + total.bytes_reduced - before.bytes_gathered - before.bytes_reduced,
        "exchanged": sequence.bytes_sent - sent if sequence else 0,
        "peak": weights + grown(ledger) if ledger else 0,
    }


def made(config: PlanConfig) -> tuple[Any, SequenceParallel | None]:
    """The model of the options with weights by chance, on the CPU, as a recipe makes it, and the group that shares its
    rows."""

    def by_chance(kind: Any, _: str, *, config: Any, **options: Any) -> Any:
        options.pop("trust_remote_code", None)
        return (getattr(kind, "from_config", None) or kind._from_config)(config, **options)

    recipe = recipe_for(config)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if config.stochastic_rounding else torch.float32
    labelled = config.task == "seq_cls"
    if labelled:
        shape = AutoConfig.from_pretrained(config.model, num_labels=config.num_labels, pad_token_id=0)
        model = AutoModelForSequenceClassification.from_config(shape, dtype=dtype)
    elif config.task == "embedding":
        model = AutoModel.from_config(AutoConfig.from_pretrained(config.model), dtype=dtype)
    else:
        model = load_pretrained(config.model, how=by_chance, dtype=dtype)
    add_blocks(model, config.new_blocks)
    sequence = None
    if config.sequence_parallel > 1:
        share_rows_of(model, config.sequence_parallel, gathers=config.task != "causal_lm")
        sequence = shared_rows_of(model).sequence
    again = config.gradient_checkpointing[0]
    task = {"seq_cls": "SEQ_CLS", "embedding": ADAPTED}.get(config.task, "CAUSAL_LM")
    model = with_adapters(in_bits(choose_checkpointing(model, again), recipe), recipe, task).train()
    if again not in ("no", 0):
        enable_checkpointing(model, config.checkpointing_reentrant)
        if config.tuner != "full" or config.new_blocks:
            model.enable_input_require_grads()
    if config.task == "generative_reranker":
        last_logits_only(model)
    return model, sequence


def optimizer_of(config: PlanConfig) -> Callable[..., torch.optim.Optimizer]:
    return optimizers.optimizer_of(recipe_for(config)) or partial(torch.optim.AdamW, fused=True)


def loss_of(config: PlanConfig, model: Any, sequence: SequenceParallel | None) -> torch.Tensor:
    """Of a micro-batch of this rank, without padding."""
    rows, length = config.per_device_batch_size[0], config.max_length[0]
    if (sample := described(config)) is not None:
        batch = sample.batch(rows, length)
        if sequence is not None:
            return chunked_loss(model, batch | {"shift_labels": sequence.shifted(batch["labels"])}, 1)
        return token_mean(model(**batch, use_cache=False), batch.pop("labels"), 1)
    ids = torch.randint(100, (rows, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if sequence is not None and config.task == "causal_lm":
        inputs["shift_labels"] = sequence.shifted(ids)
    if config.packing:
        inputs["position_ids"] = torch.arange(length // 2).repeat(rows, 2)
    if config.task == "seq_cls":
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        return LabelLoss(Labels.numbered(config.num_labels or 2))(outputs, torch.zeros(rows, dtype=torch.long))
    if config.task == "generative_reranker":
        scores = YesNo(3, 4).scores(model(ids, attention_mask=torch.ones_like(ids), use_cache=False))
        return ranking.pointwise(scores, torch.ones(rows), [rows], 1.0)
    if config.task == "embedding":
        queries, positives = pooled(model(ids, use_cache=False).last_hidden_state, torch.ones_like(ids), "last").chunk(
            2
        )
        return infonce(Embedded(queries, positives, positives[:0], torch.arange(len(queries)), queries[:, 0]), 0.1)
    if config.chunked_loss:
        return chunked_loss(model, inputs, 1)
    if not makes_its_mean(model):
        loss: torch.Tensor = model(**inputs).loss
        return loss
    labels = inputs.pop("labels")
    return token_mean(model(**inputs), labels, 1)


def note(ledger: Ledger | None, moment: str) -> None:
    gc.collect()
    if ledger is not None:
        ledger.note(moment)


def grown(ledger: Ledger) -> float:
    """The most that was allocated while it trained, beyond what was there when the model had been sharded.

    Counted from there because a thread of gloo lets go of a broadcast a moment after the wait for it: memory that it
    frees is not seen, so what comes before is not known to the byte."""
    most = live = base = 0
    for event in sorted(ledger.profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
        elif event.name() == "moment: sharded":
            base = most = live
        elif event.name() == "moment: trained":
            break
    return most - base


class Unseen:
    """A view of a run that nobody looks at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def told_and_taken(options: dict[str, Any], folder: str) -> tuple[float, float]:
    """Of a run of `rlhf` on one process: what doctor tells that it holds at most, and what it takes of memory."""
    from shardproof.cli.watching import prepared_run
    from shardproof.doctor.checks import plan_checks
    from shardproof.train.run import model_source, recipe_of

    options = {"model": "tiny", "precision": "bf16"} | options
    config = RlhfDoctorConfig(output_dir=f"{folder}/run", max_steps=3, stage=3, **options)
    recipe: Any = recipe_of(config)
    batch = recipe.check(config, 1)
    rows, _ = recipe.read(config)
    source = model_source(config, Path(folder) / "base", rows)
    prepared = prepared_run(config.model_copy(update={"model": source}), rows)
    length = plan_checks.length_of(config, prepared.rows)
    asked, experts = (
        plan_checks.plan_of(config, batch, source, length, 80.0),
        plan_checks.experts_of(config, prepared.processing),
    )
    found = plan_checks.held_apart(config, asked, batch, experts=experts).peak
    ledger = Ledger(0)
    with no_chatter(), ledger:
        recipe.train(prepared, Unseen())
    return found, ledger.read()[1]
