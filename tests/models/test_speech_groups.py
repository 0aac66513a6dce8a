"""The talker of Qwen3-Omni is trained on what it meets when the model speaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from shardproof.models.loading.classes import load_pretrained

FRAMES, NEW = 6, 5  # of codes, words


@pytest.fixture(scope="module", params=["picture", "words"])
def spoken(request, tiny_models):
    """A model, a question (with a picture, or after an earlier one), and what it said, in words and in codes."""
    from PIL import Image

    from shardproof.models.loading.processors import load_processor

    folder = str(tiny_models("qwen3_omni_moe"))
    processor = load_processor(folder)
    words = {"type": "text", "text": "which digit?"}
    question = [{"role": "system", "content": "hear"}, {"role": "user", "content": [{"type": "image"}, words]}]
    if request.param == "words":
        turns = ("user", "what?"), ("assistant", "this"), ("user", "which?")
        question = [{"role": role, "content": text} for role, text in turns]
    text = processor.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    images = [Image.new("RGB", (56, 28), "red")] if request.param == "picture" else None
    inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).eval()
    talk, said = model.talker.generate, {}

    def listen(**kwargs):
        said["result"] = talk(**kwargs)
        return said["result"]

    model.talker.generate = listen
    shared = {"thinker_pixel_values" if name == "pixel_values" else name: value for name, value in inputs.items()}
    sequences, _ = model.generate(
        **shared,
        thinker_max_new_tokens=NEW,
        thinker_eos_token_id=None,
        talker_max_new_tokens=FRAMES + 1,
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
    )
    steps = [step[-1] for step in said["result"].hidden_states if step[-1] is not None]
    pictures = {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    loaded = load_pretrained(folder).eval()
    return SimpleNamespace(model=loaded, row=sequences[0], pictures=pictures, codes=torch.stack(steps, dim=1))


def batch(row: torch.Tensor, pictures, pad: int = 0) -> dict[str, torch.Tensor]:
    """A row whose last words are the answer, with so much padding."""
    labels = torch.cat([row.new_full((len(row) - NEW,), -100), row[-NEW:]])
    wide = torch.nn.functional.pad
    return {
        **pictures,
        "input_ids": wide(row, (0, pad))[None],
        "attention_mask": wide(torch.ones_like(row), (0, pad))[None],
        "labels": wide(labels, (0, pad), value=-100)[None],
    }


def test_it_learns_the_codes_it_would_say(spoken) -> None:
    """With what `generate` said as the target, each code of each group is the likeliest at its place."""
    seen = {}
    talker, (codes,) = spoken.model.talker, spoken.codes
    assert codes.shape == (FRAMES, 3)
    hooks = [
        talker.register_forward_hook(lambda module, args, out: seen.update(first=out.logits[0])),
        talker.code_predictor.model.register_forward_hook(
            lambda module, args, out: seen.update(rest=out.last_hidden_state)
        ),
    ]
    given = batch(spoken.row, spoken.pictures, pad=2)
    out = spoken.model(**given, codes=spoken.codes)
    for hook in hooks:
        hook.remove()
    assert seen["first"][-FRAMES - 1 : -1, :64].argmax(-1).tolist() == codes[:, 0].tolist()
    for group, head in enumerate(talker.code_predictor.lm_head, 1):
        assert head(seen["rest"][:, group]).argmax(-1).tolist() == codes[:, group].tolist()
    assert out.loss > spoken.model.thinker(**given).loss
    out.loss.backward()
    without = [name for name, p in talker.named_parameters() if p.grad is None]
    # What a group's embedding is for, the last one's is only in the talker's next step; experts may stay unasked.
    assert not [name for name in without if "experts" not in name]


@torch.no_grad()
def test_a_row_is_what_it_is_in_any_batch(spoken) -> None:
    """The loss of two rows is the sum of theirs, also where one is silent."""
    model, codes = spoken.model, spoken.codes

    def loss(given, codes) -> float:
        return model(**given, codes=codes, num_items_in_batch=1).loss.item()

    one = batch(spoken.row, spoken.pictures)
    alone, silent = loss(one, codes), model(**one, num_items_in_batch=1).loss.item()
    both = {name: torch.cat([value, value]) for name, value in one.items()}
    assert loss(both, torch.cat([codes, codes])) == pytest.approx(2 * alone, rel=1e-4)
    assert loss(both, torch.cat([torch.full_like(codes, -100), codes])) == pytest.approx(alone + silent, rel=1e-4)
    short = codes.clone()
    short[:, 3:] = -100
    assert loss(both, torch.cat([codes, short])) == pytest.approx(alone + loss(one, codes[:, :3]), rel=1e-4)
