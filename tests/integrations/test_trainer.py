"""transformers' own Trainer with the mixin in front, as a script uses it: resuming, and a callback on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.errors import ConfigError

STEPS = 4


def model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, num_key_value_heads=2, **sizes))


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 67, (8,), generator=draw).tolist() for _ in range(16)]
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, stage: int | None, seed: int = 0, shard_group: int | None = None, **options: Any) -> Any:
    """None: plain, in one process."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    from shardproof.integrations.transformers import sharded

    callbacks, made = options.pop("callbacks", []), options.pop("made", model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // world,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2}
        | {"save_strategy": "steps", "save_steps": 2}
        | options,
    )
    kind, more = (Trainer, {}) if stage is None else (sharded(Trainer), {"stage": stage, "shard_group": shard_group})
    return kind(
        model=made(seed),
        args=args,
        train_dataset=rows(),
        data_collator=default_data_collator,
        callbacks=callbacks,
        **more,
    )


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def interrupted(folder: str, stage: int, optim: str) -> tuple[list[float], list[float]]:
    """The losses of a run, and of one that goes on from its middle with other weights to begin with."""
    whole = trainer(Path(folder), stage, optim=optim)
    whole.train()
    again = trainer(Path(folder), stage, seed=9, optim=optim)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return losses(whole), losses(again)


@pytest.mark.sampled
@pytest.mark.parametrize("stage, optim", [(0, "adamw_torch"), (1, "adamw_torch"), (3, "adamw_torch"), (3, "adafactor")])
def test_a_run_resumes_from_trainers_own_checkpoints(run2, tmp_path, stage, optim):
    for whole, again in run2(interrupted, str(tmp_path), stage, optim, timeout=180):
        assert len(whole) == STEPS
        assert again == whole
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file(), "the weights, as Trainer writes them"


def reduced(folder: str, stage: int, shard_group: int | None) -> int:
    """How often a buffer is reduced in one step of two micro-batches."""
    import shardproof

    more = {"gradient_accumulation_steps": 2, "max_steps": 1, "save_strategy": "no"}
    run = trainer(Path(folder), stage, shard_group=shard_group, **more)
    run.train()
    found = shardproof.stats(run.model).total.reductions
    return found // len(run.model.__dict__["_shardproof"].flats)


@pytest.mark.parametrize(("stage", "shard_group", "times"), [(1, None, 1), (3, None, 2), (3, 1, 1)])
def test_micro_batches_are_reduced_one_by_one_where_gradients_are_shared(run2, tmp_path, stage, shard_group, times):
    assert run2(reduced, str(tmp_path), stage, shard_group) == [times] * 2


def after_plain(folder: str) -> list[float]:
    again = trainer(Path(folder), 3, seed=9)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return losses(again)


def test_a_run_of_plain_trainer_goes_on_sharded(run2, tmp_path):
    plain = trainer(tmp_path, None)
    plain.train()
    for got in run2(after_plain, str(tmp_path), timeout=180):
        assert got == pytest.approx(losses(plain), abs=1e-4)


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Its rows are read by rank 0, which deals them out."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from rows()


def generates_on_rank_0(when: str, folder: str, streamed: bool = False) -> list[int]:
    """A callback of one rank generates while the other is on its way to what Trainer, or its loader, does on all."""
    from transformers import TrainerCallback

    lengths: list[int] = []

    def look(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            prompt = torch.tensor([[5, 6, 7]])
            lengths.append(kwargs["model"].generate(prompt, max_new_tokens=4, do_sample=False).shape[1])

    callback = type("Look", (TrainerCallback,), {when: look})()
    # An epoch is four steps. Nothing is logged at its end, where Trainer would meet.
    run = trainer(Path("unused"), 3, callbacks=[callback], save_strategy="no", max_steps=2 * STEPS, logging_steps=3)
    run.train_dataset = Stream() if streamed else run.train_dataset
    run.train()
    run.save_model(folder)
    return [len(lengths), len(losses(run))]


@pytest.mark.parametrize(("when", "times"), [("on_step_end", 2 * STEPS), ("on_epoch_end", 2), ("on_train_end", 1)])
def test_a_callback_may_generate_on_one_rank(run2, tmp_path, when, times):
    assert run2(generates_on_rank_0, when, str(tmp_path), timeout=180) == [[times, 2], [0, 2]]


def test_so_it_may_where_rank_0_deals_out_the_rows(run2, tmp_path):
    assert run2(generates_on_rank_0, "on_step_end", str(tmp_path), True, timeout=180) == [[2 * STEPS, 2], [0, 2]]


def evaluated(folder: str, **options: Any) -> float:
    run = trainer(Path(folder), 3, save_strategy="no", **options)
    run.train()
    return float(run.evaluate(rows())["eval_loss"])


def test_full_evaluation_in_another_precision_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="bf16=True"):
        trainer(tmp_path, 3, bf16_full_eval=True)


@pytest.mark.slow
def test_full_evaluation_in_half_precision(run2, tmp_path):
    """Outside of training, too, where transformers would cast the weights."""
    half = run2(evaluated, str(tmp_path), bf16=True, bf16_full_eval=True, timeout=180)
    assert half == run2(evaluated, str(tmp_path), bf16=True, timeout=180)


def loss_of_uneven_rows(folder: str, stage: int | None, average_tokens: bool) -> float:
    """Their number does not fit the batches. None: plain Trainer, under DDP where there are ranks."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 20, (14,), generator=draw).tolist()
    uneven = [{"ids": torch.randint(3, 67, (n,), generator=draw)} for n in lengths]
    options = {"per_device_eval_batch_size": 2, "average_tokens_across_devices": average_tokens}
    run = trainer(Path(folder), stage, remove_unused_columns=False, **options)
    run.data_collator = padded
    return float(run.evaluate(uneven)["eval_loss"])


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(ids, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "labels": labels, "attention_mask": (labels >= 0).long()}


def test_the_loss_of_an_evaluation_is_that_of_trainer_under_ddp(run2, tmp_path):
    alone = loss_of_uneven_rows(str(tmp_path), None, True)
    under_ddp = run2(loss_of_uneven_rows, str(tmp_path), None, True)
    assert under_ddp[0] != pytest.approx(alone, rel=1e-3)  # transformers' own; the page of limits tells
    for stage in (0, 3):
        assert run2(loss_of_uneven_rows, str(tmp_path), stage, True) == under_ddp
        assert run2(loss_of_uneven_rows, str(tmp_path), stage, False) == pytest.approx([alone, alone], rel=1e-6)


def mean_loss(folder: str, stage: int | None) -> float:
    return float(trainer(Path(folder), stage, save_strategy="no", logging_steps=3).train().training_loss)


def test_the_mean_loss_of_a_run_is_that_of_one_process(run2, tmp_path):
    """With the steps behind the last log, of which Trainer takes the loss of one rank."""
    alone = mean_loss(str(tmp_path), None)
    assert run2(mean_loss, str(tmp_path), 3) == pytest.approx([alone, alone], rel=1e-5)


class Fused(torch.optim.SGD):
    """As LOMO: hooks on gradients step, and `step` does nothing."""

    def fused_backward(self, loss: torch.Tensor, rate: float) -> None:
        """Accelerate calls it in place of `loss.backward()`."""


def test_an_optimizer_that_steps_inside_of_backward_is_refused(tmp_path):
    run = trainer(tmp_path, 3)
    run.optimizer = Fused(run.model.parameters())
    with pytest.raises(ConfigError, match="Fused changes weights inside backward"):
        run.train()


def compiled(folder: str, stage: int) -> tuple[list[float], list[float], list[bool]]:
    plain = trainer(Path(folder, "plain"), stage, save_strategy="no")
    plain.train()
    run = trainer(
        Path(folder, "compiled"), stage, save_strategy="no", torch_compile=True, torch_compile_backend="eager"
    )
    run.train()
    return losses(plain), losses(run), [layer._compiled_call_impl is not None for layer in run.model.model.layers]


@pytest.mark.slow
def test_torch_compile_compiles_the_blocks(run2, tmp_path):
    for plain, run, blocks in run2(compiled, str(tmp_path), 3):
        assert run == pytest.approx(plain, abs=1e-5)
        assert blocks == [True, True]


def trained_twice(folder: str, stage: int | None) -> list[list[float]]:
    """As a search for hyperparameters does it: each training begins with a model of its own."""
    run = trainer(Path(folder), stage, save_strategy="no")
    run.model_init = functools.partial(model, 0)
    found = []
    for _ in range(2):
        run.train()
        found.append(losses(run))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_model_init_makes_a_model_for_each_training(run2, tmp_path, stage):
    expected = trained_twice(str(tmp_path / "plain"), None)
    assert expected[0] == expected[1]
    for got in run2(trained_twice, str(tmp_path / "sharded"), stage):
        for course in got:
            assert course == pytest.approx(expected[0], abs=1e-5)


def classifier(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=67, pad_token_id=0, num_labels=3, **sizes))


def translator(seed: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=67, decoder_start_token_id=0, **sizes))


def pair(seed: int) -> Any:
    """Hands the number of tokens on to its decoder, which is asked for no loss."""
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    side = BertConfig(num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(side, side)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config)


def grader(seed: int, labels: int = 1) -> Any:
    """Hands the number of labels on to a loss of squares, which passes it over."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=labels, **sizes))


def tagger(seed: int) -> Any:
    return grader(seed, labels=2)


def listener(seed: int) -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2}
    still = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"), 0.0
    )
    still |= {"mask_time_prob": 0.0, "activation_dropout": 0.0, "num_conv_pos_embedding_groups": 4}
    return Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=67, ctc_loss_reduction="mean", **sizes, **convolutions, **still))


MEANS = {"classifier": classifier, "translator": translator, "pair": pair, "grader": grader, "tagger": tagger}
MEANS |= {"listener": listener}
DRAWN = {  # rows of those that take no ids: what a model is given, and its labels
    "grader": lambda ids: {"pixel_values": torch.full((3, 8, 8), ids[0] / 67), "labels": ids[1] / 67},
    "tagger": lambda ids: {"pixel_values": torch.full((3, 8, 8), ids[0] / 67), "labels": [ids[1] / 67, 1.0]},
    "listener": lambda ids: {"input_values": torch.tensor(ids).float().repeat(40).sin(), "labels": ids[:4]},
}


def learnt_by_a_mean(folder: str, stage: int | None, name: str, steps: int) -> list[float]:
    """The losses and norms of a model that returns the mean of its batch whatever Trainer counts, and of an
    evaluation."""
    options = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": steps, "save_strategy": "no"}
    run = trainer(Path(folder), stage, made=MEANS[name], max_steps=2, **options)
    if name == "classifier":
        run.train_dataset = [row | {"labels": row["input_ids"][0] % 3} for row in rows()]
    if name in DRAWN:
        run.train_dataset = [DRAWN[name](row["input_ids"]) for row in rows()]
    run.train()
    norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    return [*losses(run), *norms, run.evaluate(run.train_dataset)["eval_loss"]]


@pytest.mark.parametrize(
    ("name", "steps", "stage"),
    [
        ("classifier", 2, 0),
        ("classifier", 1, 3),
        ("translator", 2, 3),
        ("pair", 1, 3),
        ("grader", 1, 3),
        ("tagger", 1, 3),
        ("listener", 1, 3),
    ],
)
def test_a_loss_that_is_a_mean_does_not_grow_with_the_ranks(run2, tmp_path, name: str, steps: int, stage: int):
    """Trainer multiplies by their number the loss of whatever takes **kwargs."""
    expected = learnt_by_a_mean(str(tmp_path), None, name, steps)
    for got in run2(learnt_by_a_mean, str(tmp_path), stage, name, steps):
        assert got == pytest.approx(expected, rel=1e-4)


def translated(folder: str, stage: int | None) -> list[float | list[int]]:
    """The loss of an evaluation behind some steps, and what was written in it: a list of tokens for each row."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

    from shardproof.integrations.transformers import sharded

    world = dist.get_world_size() if dist.is_initialized() else 1
    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4 // world,
        max_steps=STEPS,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    kind, more = (Seq2SeqTrainer, {}) if stage is None else (sharded(Seq2SeqTrainer), {"stage": stage})
    run = kind(model=translator(0), args=args, train_dataset=rows(), data_collator=default_data_collator, **more)
    run.train()
    told = run.predict(rows())
    return [told.metrics["test_loss"], *told.predictions.tolist()]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_writes_beside_what_is_read_answers_as_in_one_process(run2, tmp_path, stage: int):
    """T5 by the trainer that an error of the command names."""
    loss, *wanted = translated(str(tmp_path / "plain"), None)
    for found, *written in run2(translated, str(tmp_path), stage, timeout=180):
        assert written == wanted
        assert found == pytest.approx(loss, abs=1e-5)


def total_of(model: Any, inputs: Any) -> torch.Tensor:
    logits, labels = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Divided:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        return total_of(model, inputs) / num_items_in_batch


class HandedOn:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class Multiplied:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        return total_of(model, inputs) / num_items_in_batch * self.accelerator.num_processes


class Around(Divided):
    def compute_loss(self, *args: Any, **kwargs: Any):
        return super().compute_loss(*args, **kwargs)


def learnt_by_its_own_loss(folder: str, stage: int | None, own: type, outermost: bool) -> list[float]:
    """The losses and norms of a trainer that makes its loss itself."""
    from transformers import Trainer

    from shardproof.integrations.transformers import sharded

    plain = trainer(Path(folder), None, save_strategy="no", gradient_accumulation_steps=2, max_steps=2)
    if stage is None:
        kind, more = type("Own", (own, Trainer), {}), {}
    elif outermost:  # written over the class that is sharded
        kind, more = type("Own", (own, sharded(Trainer)), {}), {"stage": stage}
    else:
        kind, more = sharded(type("Own", (own, Trainer), {})), {"stage": stage}
    mine = kind(model=plain.model, args=plain.args, train_dataset=rows(), data_collator=plain.data_collator, **more)
    mine.train()
    return [line[key] for line in mine.state.log_history if "loss" in line for key in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    ("own", "stage", "outermost"),
    [(Divided, 0, False), (HandedOn, 3, False), (Multiplied, 3, False), (Around, 3, False), (Divided, 3, True)],
)
def test_a_loss_that_a_trainer_divides_itself_does_not_shrink_with_the_ranks(run2, tmp_path, own, stage, outermost):
    """Trainer gives it the tokens of all ranks, and gradients are averaged over these."""
    expected = learnt_by_its_own_loss(str(tmp_path), None, own, outermost)
    for got in run2(learnt_by_its_own_loss, str(tmp_path), stage, own, outermost):
        assert got == pytest.approx(expected, rel=1e-4)
