"""Training a talker: the codes of a spoken answer, from the thinker's states for question and answer.

[Note: inputs of the talker] Qwen2.5-Omni's talker is trained on the inputs it gets when the model speaks (`generate` in
transformers). For each token of the question, it gets the sum of the thinker's embedding and last state, without the
embeddings of images and audio; then a mark that speech begins. From then on, each step adds the previous code to the
next token of the answer, and after the end of the answer, to a mark for that, and then to padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

IGNORE = -100


def speaking_forward(
    model: Any, codes: torch.Tensor | None = None, *, codes_loss: Callable[..., torch.Tensor], **inputs: Any
) -> Any:
    """The forward of an omni model whose rows may have spoken answers.

    Args:
        model: a Qwen-Omni.
        codes: the talker's codes, int64, -100 after the end and where there is no speech; (rows, longest), or (rows,
            longest, groups) if the model's frames are groups of codes.
        codes_loss: the loss of its talker, `codes_loss` of this module or of `speech_groups`.
        inputs: for the thinker.

    Returns: the thinker's output. The loss of the codes is added to its loss; a code weighs as much as a token.
    """
    if codes is None or not model.has_talker or "labels" not in inputs:
        return model.thinker(**inputs)
    # PEFT models pass all their named arguments, even if None.
    out = model.thinker(**{**inputs, "output_hidden_states": True})
    out.loss = out.loss + codes_loss(model, inputs, out.hidden_states, codes)
    return out


def codes_loss(model: Any, inputs: dict[str, Any], states: Any, codes: torch.Tensor) -> torch.Tensor:
    """The loss of Qwen2.5-Omni's talker, from the thinker's states."""
    import torch

    heard = _without_files(model, inputs["input_ids"], states[0]) + states[-1]  # (rows, length, width)
    places = places_of(model, inputs)
    rows = [_row(model, heard[i], inputs, i, places[:, i], row[row != IGNORE]) for i, row in _spoken(codes)]
    length = max(len(given) for given, _, _ in rows)
    embedded = torch.stack([padded(given, length) for given, _, _ in rows])
    targets = torch.stack([padded(wanted, length, IGNORE) for _, wanted, _ in rows])
    positions = torch.stack([padded(where.T, length).T for _, _, where in rows], dim=1)  # (3, rows, length)
    mask = torch.stack([padded(torch.ones_like(wanted), length) for _, wanted, _ in rows])
    logits = model.talker(inputs_embeds=embedded, attention_mask=mask, position_ids=positions).logits
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    items = inputs.get("num_items_in_batch")
    return total / (targets.ne(IGNORE).sum() if items is None else items)


def _spoken(codes: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(i, row) for i, row in enumerate(codes) if bool(row.ne(IGNORE).any())]


def _row(
    model: Any, heard: torch.Tensor, inputs: dict[str, Any], i: int, places: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The talker's inputs for one row (length, width), its targets at each place, and the places (3, length). See
    [Note: inputs of the talker]."""
    import torch

    talker, words = model.talker, model.thinker.get_input_embeddings()
    start, end = answer_of(inputs["labels"][i])

    def word(token: int) -> torch.Tensor:
        return words(torch.tensor([token], device=heard.device))

    def code(tokens: torch.Tensor) -> torch.Tensor:
        return talker.get_input_embeddings()(tokens)

    mark = codes.new_tensor
    said = torch.cat([heard[start : end - 1], word(talker.text_eos_token)])  # without the token that ends the turn
    steps = len(codes) + 1
    said = torch.cat([said[:steps], word(talker.text_pad_token).expand(max(0, steps - len(said)), -1)])
    before = code(torch.cat([mark([talker.codec_bos_token]), codes]))
    begin = word(_voice(model)) + code(mark([talker.codec_pad_token]))
    given = torch.cat([heard[:start], begin, said + before])
    wanted = torch.cat([codes.new_full((start + 1,), IGNORE), codes, mark([talker.codec_eos_token])])
    after = places[:, :start].max() + 1 + torch.arange(steps + 1, device=heard.device)
    return given, wanted, torch.cat([places[:, :start], after.expand(3, -1)], dim=1)


def answer_of(labels: torch.Tensor) -> tuple[int, int]:
    """The start and end of the last answer of a row."""
    learnt = labels.ne(IGNORE).tolist()
    end = len(learnt) - learnt[::-1].index(True)
    start = end - next((k for k, is_learnt in enumerate(learnt[:end][::-1]) if not is_learnt), end)
    return start, end


def _voice(model: Any) -> int:
    """The mark that begins speech in the model's first voice."""
    voice = next(iter(model.speaker_map.values()), None)
    return int(voice["bos_token"]) if voice else int(model.talker.text_bos_token)


def _without_files(model: Any, ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    config = model.config.thinker_config
    files = (ids == config.image_token_index) | (ids == config.audio_token_index) | (ids == config.video_token_index)
    return embeddings.masked_fill(files.unsqueeze(-1), 0)


def places_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Positions in time, height and width: int64 of shape (3, rows, length)."""
    sounds = inputs.get("feature_attention_mask")
    return model.thinker.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs.get("attention_mask"),
        False,
        None if sounds is None else sounds.sum(-1),
        inputs.get("video_second_per_grid"),
    )[0]


def padded(values: torch.Tensor, length: int, value: int = 0) -> torch.Tensor:
    """`values` padded with `value` to `length` along the first dimension."""
    import torch

    missing = values.new_full((length - len(values), *values.shape[1:]), value)
    return torch.cat([values, missing])
