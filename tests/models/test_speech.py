"""The talker is trained on what it meets when the model speaks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

from shardproof.models.loading.classes import load_pretrained

CODES, BEGIN, END = 7, 61, 62
NEW = 4  # words


@pytest.fixture(scope="module")
def spoken(tiny_models):
    """A model, two questions (one with a picture), and what it said to them, in words and in codes.

    In a batch, for transformers 5.23 forgets the marks of the talker where no row is padded.
    """
    from PIL import Image

    from shardproof.models.loading.processors import load_processor

    folder = str(tiny_models("qwen2_5_omni"))
    processor = load_processor(folder)
    picture, words = {"type": "image"}, {"type": "text", "text": "which digit?"}
    questions = [[{"role": "user", "content": content}] for content in ([picture, words], "what?")]
    template = processor.tokenizer.apply_chat_template
    texts = [template(question, tokenize=False, add_generation_prompt=True) for question in questions]
    images = [[Image.new("RGB", (16, 16), "red")], []]
    inputs = dict(processor(text=texts, images=images, return_tensors="pt", padding=True))
    model = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(folder).eval()
    talk, said = model.talker.generate, {}

    def listen(**kwargs):
        said["codes"] = talk(**kwargs)[:, kwargs["input_ids"].shape[1] :]
        return torch.cat([kwargs["input_ids"], said["codes"]], dim=1)

    model.talker.generate = listen
    shared = {"thinker_pixel_values" if name == "pixel_values" else name: value for name, value in inputs.items()}
    sequences, _ = model.generate(
        **shared,
        thinker_max_new_tokens=NEW,
        talker_max_new_tokens=CODES,
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
        talker_eos_token_id=[END],
    )
    rows = [ids[mask.argmax() :] for ids, mask in zip(sequences, inputs["attention_mask"], strict=True)]
    pictures = {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    return SimpleNamespace(model=load_pretrained(folder).eval(), rows=rows, pictures=pictures, codes=said["codes"])


def batch(rows, pictures) -> dict[str, torch.Tensor]:
    """Rows whose last words are the answer, padded on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    labels = [torch.cat([row.new_full((len(row) - NEW,), -100), row[-NEW:]]) for row in rows]
    return {
        **pictures,
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def test_it_learns_the_codes_it_would_say(spoken) -> None:
    """With what `generate` said as the target, each code is the likeliest at its place."""
    seen = {}
    hook = spoken.model.talker.register_forward_hook(lambda module, args, out: seen.update(logits=out.logits))
    given = batch(spoken.rows, spoken.pictures)
    out = spoken.model(**given, codes=spoken.codes)
    hook.remove()
    for logits, row, codes in zip(seen["logits"], spoken.rows, spoken.codes, strict=True):
        places = logits[len(row) - NEW + 1 :][:CODES].detach().clone()
        places[:, BEGIN] = -torch.inf  # `generate` never says the mark that begins speech
        assert places.argmax(-1).tolist() == codes.tolist()
    assert out.loss > spoken.model.thinker(**given).loss
    out.loss.backward()
    assert not [name for name, p in spoken.model.talker.named_parameters() if p.grad is None]


@torch.no_grad()
def test_rows_are_told_apart(spoken) -> None:
    """The loss of two rows is the sum of theirs, also where one is silent or shorter."""
    model, (seen, plain) = spoken.model, spoken.rows
    first, second = batch([seen], spoken.pictures), batch([plain], {})
    both = batch([seen, plain], spoken.pictures)
    long, short = spoken.codes[:1], spoken.codes[1:, :3]
    padded = torch.nn.functional.pad(short, (0, CODES - 3), value=-100)

    def loss(given, codes=None) -> float:
        return model(**given, codes=codes, num_items_in_batch=1).loss.item()

    alone = loss(first, long)
    assert loss(both, torch.cat([long, padded])) == pytest.approx(alone + loss(second, short), abs=1e-4)
    silent = torch.full_like(padded, -100)
    assert loss(both, torch.cat([long, silent])) == pytest.approx(alone + loss(second), abs=1e-4)


def test_an_adapted_model_learns_codes_too(spoken) -> None:
    """PEFT passes on every argument that it knows by name, if only as None."""
    from peft import LoraConfig, get_peft_model

    given = batch(spoken.rows, spoken.pictures)
    plain = spoken.model(**given, codes=spoken.codes).loss
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = get_peft_model(copy.deepcopy(spoken.model), config)
    torch.testing.assert_close(adapted(**given, codes=spoken.codes).loss, plain)
