"""Promise: the trainers of sentence-transformers, `sharded`, have the losses and weights of one process, whatever their
losses do with the graph: backward of cached embeddings chunk by chunk, negatives of other ranks, heads of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof

WORDS = "the a red blue green cat dog car house runs sits jumps fast slow big small on in under tree".split()
STEPS, ROWS, WIDTH = 3, 4, 16
CHUNK = {"mini_batch_size": 2}
# Of a loss: its kind of model, its class, its rows, its arguments.
LOSSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "ranking": ("sentence", "MultipleNegativesRankingLoss", "triplets", {}),
    "of all ranks": ("sentence", "CachedMultipleNegativesRankingLoss", "triplets", {**CHUNK, "across": True}),
    "cached": ("sentence", "CachedMultipleNegativesRankingLoss", "triplets", CHUNK),
    "cosent": ("sentence", "CoSENTLoss", "scored", {}),
    "head": ("sentence", "SoftmaxLoss", "classes", {"sentence_embedding_dimension": WIDTH, "num_labels": 3}),
    "margin": ("sentence", "MarginMSELoss", "margins", {}),
    "mega": ("sentence", "MegaBatchMarginLoss", "pairs", {}),
    "pairs": ("cross", "BinaryCrossEntropyLoss", "judged", {}),
    "lists": ("cross", "LambdaLoss", "lists", {}),
    "tokens": ("multi", "CachedMultiVectorMultipleNegativesRankingLoss", "triplets", CHUNK),
}
DEFAULT = ("of all ranks", "head")  # the rest with --slow


def text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 8)))


def dataset(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(3)
    rows: list[dict[str, Any]] = []
    for _ in range(2 * STEPS * ROWS):
        if kind == "lists":
            rows.append({"query": text(draw), "docs": [text(draw) for _ in range(3)]})
            rows[-1]["labels"] = [draw.random() for _ in range(3)]
            continue
        row: dict[str, Any] = {"a": text(draw), "b": text(draw)}
        if kind in ("triplets", "margins"):
            row["c"] = text(draw)
        if kind in ("scored", "margins"):
            row["label"] = draw.random()
        if kind in ("classes", "judged"):
            row["label"] = draw.randrange(3 if kind == "classes" else 2)
        rows.append(row)
    return Dataset.from_list(rows)


def base(folder: Path) -> str:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes, **dropped))
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)
    return str(folder)


def made(name: str, source: str, folder: str, stage: int | None, **options: Any) -> Any:
    """A trainer, the plain one where there is no stage: it sees in two micro-batches what two ranks see in one each,
    or in one batch, where ranks see each other's rows."""
    import sentence_transformers
    from sentence_transformers.cross_encoder import losses as of_pairs
    from sentence_transformers.multi_vector_encoder import losses as of_tokens
    from sentence_transformers.sentence_transformer import losses as of_sentences

    from shardproof.integrations.transformers import sharded

    kind, stem, rows, given = LOSSES[name]
    classes = {"sentence": "SentenceTransformer", "cross": "CrossEncoder", "multi": "MultiVectorEncoder"}
    torch.manual_seed(1)
    more = {"num_labels": 1} if kind == "cross" else {}
    model = getattr(sentence_transformers, classes[kind])(source, device="cpu", **more)
    module = {"sentence": of_sentences, "cross": of_pairs, "multi": of_tokens}[kind]
    own = {key: value for key, value in given.items() if key != "across"}
    if "across" in given:
        own["gather_across_devices"] = True
    loss = getattr(module, stem)(model, **own)
    trainer = getattr(sentence_transformers, f"{classes[kind]}Trainer")
    alone = {} if stage is not None else {"gradient_accumulation_steps": 1 if "across" in given else 2}
    rows_a_batch = 2 * ROWS if stage is None and "across" in given else ROWS
    args = getattr(sentence_transformers, f"{classes[kind]}TrainingArguments")(
        output_dir=folder,
        per_device_train_batch_size=rows_a_batch,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **alone, **options.pop("args", {})},
    )
    if stage is not None:
        trainer, options["stage"] = sharded(trainer), stage
        if name == "head":  # a part of the loss, beside the model
            shardproof.shard(loss.classifier, stage)
    return trainer(model=model, args=args, train_dataset=dataset(rows), loss=loss, **options)


def numbers(name: str, source: str, folder: str, stage: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = made(name, source, folder, stage)
    trainer.train()
    read = torch.nn.Module.state_dict if stage is None else shardproof.full_state_dict
    weights = dict(read(trainer.model))
    if name == "head":
        weights |= {f"head.{key}": value for key, value in read(trainer.loss.classifier).items()}
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], weights


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in LOSSES])
def test_two_ranks_equal_one_process(run2, tmp_path: Path, name: str, stage: int) -> None:
    source = base(tmp_path / "base")
    losses, weights = numbers(name, source, str(tmp_path / "one"), None)
    (found, state), (others, _) = run2(numbers, name, source, str(tmp_path / "two"), stage, timeout=180)
    assert found == others == pytest.approx(losses, abs=1e-5)
    assert state.keys() == weights.keys()
    for key, value in weights.items():  # where a gradient is rounding, AdamW makes it large
        torch.testing.assert_close(state[key], value, atol=1e-3, rtol=0, msg=key)


def evaluated(source: str, folder: str) -> tuple[list[float], Any]:
    """An evaluator runs on the main process alone, and the best weights are loaded in the end."""
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    scored = dataset("scored")
    evaluator = EmbeddingSimilarityEvaluator(scored["a"], scored["b"], scored["label"], name="dev")
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_dev_spearman_cosine"}
    trainer = made("cached", source, folder, 3, evaluator=evaluator, args={**steps, **best})
    trainer.train()
    trainer.save_model(f"{folder}/final")
    shardproof.barrier(trainer.model)
    values = [log["eval_dev_spearman_cosine"] for log in trainer.state.log_history if "eval_dev_spearman_cosine" in log]
    return values, trainer.model.encode(scored["a"][:4])


@pytest.mark.slow
def test_an_evaluator_and_the_best_weights(run2, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    (values, vectors), _ = run2(evaluated, base(tmp_path / "base"), str(tmp_path / "run"), timeout=180)
    assert len(values) == STEPS
    saved = SentenceTransformer(str(tmp_path / "run" / "final"), device="cpu").encode(dataset("scored")["a"][:4])
    assert saved == pytest.approx(vectors, abs=1e-6)
