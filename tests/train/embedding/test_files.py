"""Promise: pictures and sounds are embedded beside texts, with the losses of one process at every stage, as plain
transformers and sentence-transformers embed them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.cli.main import main
from shardproof.errors import ConfigError, DataError
from shardproof.train.embedding.embedder import Embedder, single
from shardproof.train.embedding.pooling import Embedding, embedding_in
from shardproof.train.options.config import SftConfig
from train.embedding.test_same_losses import COMMON, LORA, STAGES

pytestmark = pytest.mark.slow

CHECKPOINTED = [
    {"stage": 3, "gradient_checkpointing": True},
    {"stage": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True},
]


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROWS: list[dict[str, Any]] = [
    {
        "messages": turns("what is it?"),
        "positive_messages": [turns("<image>")],
        "positive_images": [["a.png"]],
        "negative_messages": [turns("<image> or <image>"), turns("neither")],
        "negative_images": [["b.png", "a.png"], []],
    },
    {"query": "<image>which?", "images": ["b.png"], "positive": "the one with stripes"},
    {
        "anchor": "nothing to see",
        "positive": "a text",
        "negative": ["<image>no", "no"],
        "negative_images": [["c.png"], []],
    },
    {
        "query": "and this?",
        "positive": [{"role": "user", "content": [{"type": "image", "image": "c.png"}, "!"]}],
    },
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a sound, `rows.jsonl`, 12 rows, and `heard.jsonl`, of which some have a sound."""
    import numpy as np
    import soundfile
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("seen"), np.random.default_rng(0)
    for name, size in (("a.png", (16, 24, 3)), ("b.png", (16, 40, 3)), ("c.png", (32, 24, 3))):
        Image.fromarray(chance.integers(0, 255, size, dtype=np.uint8)).save(folder / name)
    soundfile.write(folder / "a.wav", np.sin(np.arange(8000) / 5).astype("float32"), 16000)
    heard = {"query": "<audio>", "audios": ["a.wav"], "positive": "a tone"}
    for name, rows in (("rows", ROWS), ("heard", [heard, *ROWS[:3]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return folder


def check(trained: Any, model: Path, rows: Path, variants: list[dict[str, Any]], **more: Any) -> None:
    """Two ranks with micro-batches of 2 rows are to be one process with micro-batches of 4."""
    options = (*COMMON, "--workers", "0", "--model", str(model), "--dataset", str(rows), "--val-dataset", str(rows))
    shape = {"gradient_accumulation_steps": 1, "max_steps": 3, "learning_rate": 1e-4, **more}
    ((expected, _),) = trained(1, [{"stage": 0, "per_device_batch_size": 4, **shape}], *options)
    many = [{"per_device_batch_size": 2, **shape, **variant} for variant in variants]
    for variant, (got, _) in zip(many, trained(2, many, *options), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_mrr", "eval_mean_pos"):
            near = {"abs": 1e-5} if "loss" in key else {"rel": 2e-4, "abs": 1e-4}
            mine, one_s = ([record[key] for record in records if key in record] for records in (got, expected))
            assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert all(record["grad_norm"] > 1e-3 for record in expected if "grad_norm" in record)
    assert sum("loss" in record for record in expected) == 3


def test_two_ranks_give_the_losses_of_one_process(trained: Any, tiny_models: Any, seen: Path) -> None:
    check(trained, tiny_models("qwen2_5_vl"), seen / "rows.jsonl", [STAGES[0], STAGES[3]])


@pytest.mark.slow
def test_so_they_do_at_every_stage_checkpointed_and_with_adapters(trained: Any, tiny_models: Any, seen: Path) -> None:
    check(trained, tiny_models("qwen2_5_vl"), seen / "rows.jsonl", [*STAGES, *CHECKPOINTED], pooling="mean")
    check(trained, tiny_models("qwen2_5_vl"), seen / "rows.jsonl", [*STAGES, *CHECKPOINTED], **LORA)


@pytest.mark.slow
def test_so_they_do_where_they_share_rows(trained: Any, tiny_models: Any, seen: Path) -> None:
    shared = {"stage": 3, "sequence_parallel": 2, "per_device_batch_size": 4}
    check(trained, tiny_models("qwen2_5_vl"), seen / "rows.jsonl", [shared])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl", "llava", "minicpmv4_6"])
def test_so_they_do_of_other_families(trained: Any, tiny_models: Any, seen: Path, name: str) -> None:
    check(trained, tiny_models(name), seen / "rows.jsonl", [STAGES[3]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_so_they_do_of_omni_models(trained: Any, tiny_models: Any, seen: Path, name: str) -> None:
    check(trained, tiny_models(name), seen / "heard.jsonl", [STAGES[0], STAGES[3], *CHECKPOINTED])


def asked(folder: Path, seen: Path, system: str | None = None) -> tuple[Any, list[Any]]:
    """An embedder of a folder, and what is to be embedded: a text, a picture, and both."""
    picture = {"type": "image", "image": str(seen / "a.png")}
    return Embedder(folder, embedding_in(folder) or Embedding("last", system)), [
        "which one?",
        [picture],
        [{"type": "text", "text": "this "}, picture, {"type": "text", "text": " one"}],
    ]


@pytest.mark.parametrize("name", ["gemma3", "llava"])  # of which transformers has the processor without torchvision
def test_embeddings_are_those_of_plain_transformers(tiny_models: Any, seen: Path, name: str) -> None:
    from PIL import Image
    from transformers import AutoModel, AutoProcessor

    folder = tiny_models(name)
    model, processor = AutoModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    ours, contents = asked(folder, seen, "Look.")
    for content in contents:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
        text = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        files = {} if isinstance(content, str) else {"images": [Image.open(seen / "a.png")]}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **files)
        with torch.no_grad():
            last = model(**inputs).last_hidden_state[0, -1]
        (found,) = ours.embeddings([single(content)])
        torch.testing.assert_close(found[0], torch.nn.functional.normalize(last, dim=-1), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def done(commands: Callable[..., Any], tiny_models: Any, seen: Path) -> Any:
    argv = ["sft", "--task", "embedding", "--model", str(tiny_models("llava")), "--dataset", str(seen / "rows.jsonl")]
    argv += ["--max-steps", "2", "--per-device-batch-size", "4", "--system", "Find it.", "--save-steps", "2"]
    picture = ["--prompt", "<image>", "--image", str(seen / "a.png")]
    return commands(
        [
            ("run", [*argv, "--nproc", "2", "--output-dir", "OUT"]),
            ("lora", [*argv, "--tuner", "lora", "--output-dir", "OUT"]),
            ("asked", ["infer", "RUNS/run", *picture]),
            ("rows", ["infer", "RUNS/lora", "--dataset", str(seen / "rows.jsonl"), "--result-path", "OUT.jsonl"]),
            ("exported", ["export", "RUNS/run", "OUT"]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("of checkpoint", ["export", "RUNS/run/checkpoint-2", "OUT"]),
            ("of exported", ["infer", "RUNS/exported", *picture]),
            ("doctor", ["doctor", *argv[1:7], "--per-device-batch-size", "2"]),
            ("shown", ["data", "show", *argv[1:7]]),
        ]
    )


def test_all_went_well(done: Any) -> None:
    assert {name: run.code for name, run in done.items() if run.code} == {}, done


def test_what_is_exported_embeds_alike(done: Any, seen: Path) -> None:
    assert json.loads(done["asked"].output.splitlines()[-1]) == json.loads(done["of exported"].output.splitlines()[-1])
    how = Embedding("last", "Find it.", ("image",))
    for name in ("exported", "merged", "of checkpoint"):
        assert embedding_in(done[name].folder) == how
    found = [asked(done[name].folder, seen)[0].embeddings([single("x")])[0] for name in ("exported", "of checkpoint")]
    assert torch.equal(*found)
    rows = [json.loads(line) for line in done["rows"].folder.with_name("rows.jsonl").read_text().splitlines()]
    assert [len(row["similarities"]) for row in rows] == [3, 1, 3, 1] * 3
    assert "<image> x" in done["shown"].output
    assert "18 can be read" in done["doctor"].output  # those of what is to be found, too


def test_sentence_transformers_gives_the_same(done: Any, seen: Path) -> None:
    from PIL import Image
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(done["merged"].folder))
    ours, (text, picture, _) = asked(done["merged"].folder, seen)
    expected = ours.embeddings([single(text)])[0][0]
    torch.testing.assert_close(torch.from_numpy(theirs.encode(text, prompt_name="query")), expected, rtol=0, atol=1e-5)
    row = single("x")
    row.extra["positive"] = [[{"role": "user", "content": picture}]]
    expected = ours.embeddings([row])[0][1]
    found = theirs.encode([Image.open(seen / "a.png")])[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)


def prepared(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], seen: Path, **options: Any) -> Any:
    from shardproof.train.embedding import recipe as embedding

    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = {"dataset": [str(file)], "output_dir": str(tmp_path / "run"), "media_root": str(seen), "workers": 0}
    config = SftConfig(task="embedding", model=str(folder), **place, **options)
    return embedding.prepare(config, 1, *embedding.read(config))


@pytest.mark.parametrize(
    "row, why",
    [
        ({"query": "x", "positive": "<image>", "positive_images": ["none.png"]}, "there is no such file"),
        (
            {"query": "x", "positive": "<image>", "positive_images": ["a.png", "b.png"]},
            r"positive\[0\]: 1 place for image",
        ),
        (
            {"query": "x", "positive": "y", "negative": ["<image>", "z"], "negative_images": [["a.png"]]},
            "'negative_images' must hold a list of images for each negative, of which there are 2",
        ),
        ({"query": "x", "positive": "<audio>", "positive_audios": ["a.wav"]}, "it has a file of kind audio"),
    ],
)
def test_rows_that_cannot_be_used(tiny_models: Any, tmp_path: Path, seen: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"some.jsonl:1: .*{why}"):
        prepared(tiny_models("llava"), tmp_path, [row], seen)


def test_a_model_of_text_takes_no_files(models: Any, tmp_path: Path, seen: Path) -> None:
    with pytest.raises(DataError, match=r"some.jsonl:2: it has files, but this is a text model"):
        prepared(models["decoder"], tmp_path, [{"query": "x", "positive": "y"}, ROWS[1]], seen)


def test_a_row_whose_file_is_lost_is_left_out(tiny_models: Any, tmp_path: Path, seen: Path, caplog) -> None:
    from shardproof.data.media.embed import MediaMatchCollator
    from shardproof.train.embedding.recipe import media_encoder

    own = Path(shutil.copytree(seen, tmp_path / "own"))
    made = prepared(tiny_models("llava"), tmp_path, ROWS, own)
    encoder = media_encoder(made.config, made.processing)
    whole = MediaMatchCollator(encoder)([made.rows[i] for i in range(4)])
    assert whole["labels"]["rows"] == 4
    assert len(whole["input_ids"]) == len(whole["attention_mask"]) == 8 + 4
    (own / "b.png").unlink()
    left = MediaMatchCollator(encoder)([made.rows[i] for i in range(4)])
    assert left["labels"]["rows"] == 2
    assert "some.jsonl:1 is left out of its step" in caplog.text
    assert "some.jsonl:2 is left out of its step" in caplog.text
    with pytest.raises(DataError, match=r"some.jsonl:1: image 1 \(b.png\)"):
        MediaMatchCollator(encoder, "stop")([made.rows[i] for i in range(4)])
    none = MediaMatchCollator(encoder)([made.rows[1]])
    assert none["labels"]["rows"] == len(none["labels"]["keys"]) == len(none["labels"]["scores"]) == 0
    assert len(none["input_ids"]) == 1, "which the model runs on with the others"


@pytest.mark.parametrize("loss", ["infonce", "cosine_similarity", "contrastive"])
def test_a_text_of_no_row_is_no_part_of_a_loss(loss: str) -> None:
    from shardproof.train.embedding import similarity
    from shardproof.train.embedding.similarity import Embedded

    texts = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1).requires_grad_()
    keys, scores = torch.arange(2), torch.ones(2)
    none = Embedded.of(texts[:1], 0, keys[:0], scores[:0])
    more = [0.1] if loss == "infonce" else []
    alone = getattr(similarity, loss)(none, *more)
    alone.backward()
    assert float(alone) == 0
    assert not texts.grad.any()
    some = Embedded.of(texts, 2, keys, scores)
    together = getattr(similarity, loss)(Embedded.together([none, some]), *more)
    assert together.tolist() == getattr(similarity, loss)(some, *more).tolist()


def test_options_of_text_are_refused(tiny_models: Any, tmp_path: Path, seen: Path, capsys) -> None:
    with pytest.raises(ConfigError, match="--truncation split"):
        prepared(tiny_models("llava"), tmp_path, ROWS, seen, truncation="split")
    argv = ["plan", "--task", "embedding", "--model", str(tiny_models("llava")), "--gpus", "2"]
    assert main([*argv, "--files", "image=16x16"]) == 2
    assert "--files: plans for --task embedding support text rows only" in capsys.readouterr().err


def test_files_are_told_apart_by_where_they_lie(tiny_models: Any, tmp_path: Path, seen: Path) -> None:
    """Rows of two folders name their pictures alike: the one is a negative of the other."""
    from shardproof.data.media.embed import MediaMatchCollator
    from shardproof.train.embedding import recipe as embedding

    row = {"query": "x", "positive": "<image>", "positive_images": ["a.png"]}
    elsewhere = {**row, "positive_images": [[str(seen / "a.png")]]}
    for name, picture in (("one", "a.png"), ("other", "b.png")):
        (tmp_path / name).mkdir()
        shutil.copy(seen / picture, tmp_path / name / "a.png")
        (tmp_path / name / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (seen / "again.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, elsewhere)))
    files = [*(str(tmp_path / name / "rows.jsonl") for name in ("one", "other")), str(seen / "again.jsonl")]
    config = SftConfig(task="embedding", model=str(tiny_models("llava")), dataset=files, workers=0)
    made = embedding.prepare(
        config.model_copy(update={"output_dir": str(tmp_path / "run")}), 1, *embedding.read(config)
    )
    encoder = embedding.media_encoder(made.config, made.processing)
    keys = MediaMatchCollator(encoder)([made.rows[i] for i in range(4)])["labels"]["keys"].tolist()
    assert len(set(keys)) == 3
    assert keys[2] == keys[3]


def test_parts_are_named_as_in_sft(tiny_models: Any, tmp_path: Path, seen: Path) -> None:
    from shardproof.train.embedding import recipe as embedding

    made = prepared(
        tiny_models("qwen2_5_omni"), tmp_path, ROWS, seen, train_parts=["vision"], enable_audio_output=False
    )
    model = embedding.build(made)
    assert {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"visual"}
    assert not hasattr(model, "talker")
    with pytest.raises(ConfigError, match="--train-parts talker: a talker does not produce a vector"):
        prepared(tiny_models("qwen2_5_omni"), tmp_path / "other", ROWS, seen, train_parts=["talker"])


def test_a_run_in_which_no_file_reaches_what_is_trained_is_refused(
    tiny_models: Any, tmp_path: Path, seen: Path
) -> None:
    from shardproof.train.embedding import recipe as embedding

    made = prepared(tiny_models("llava"), tmp_path, [ROWS[0]] * 2, seen, freeze=["llm"])
    embedding.build(made)  # it is what is to be found that has pictures
    made = prepared(
        tiny_models("llava"), tmp_path / "other", [{"query": "x", "positive": "y"}] * 2, seen, freeze=["llm"]
    )
    with pytest.raises(ConfigError, match="Nothing would be learned: only aligner, vision is trained, and no row has"):
        embedding.build(made)


def test_a_model_without_one_backbone_is_refused_before_its_rows_are_read(
    tiny_models: Any, tmp_path: Path, seen: Path, monkeypatch
) -> None:
    from transformers import LlavaForConditionalGeneration

    monkeypatch.setattr(LlavaForConditionalGeneration, "base_model_prefix", "")
    monkeypatch.setattr("shardproof.train.embedding.recipe.encode", None)
    with pytest.raises(ConfigError, match="--task embedding needs a model whose towers and language model are one"):
        prepared(tiny_models("llava"), tmp_path, ROWS, seen)


def test_a_model_without_a_chat_template_is_given_one(tiny_models: Any, tmp_path: Path, seen: Path) -> None:
    from shardproof.train.embedding import recipe as embedding

    folder = Path(shutil.copytree(tiny_models("llava"), tmp_path / "bare"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="Give it one with --chat-template"):
        prepared(folder, tmp_path / "none", ROWS, seen)
    made = prepared(folder, tmp_path / "chatml", ROWS, seen, chat_template="chatml")
    encoder = embedding.media_encoder(made.config, made.processing)
    assert (
        encoder.media.text(made.rows[3]["row"])[0] == "<|im_start|>user\nand this?<|im_end|>\n<|im_start|>assistant\n"
    )
