"""Training the talker of Qwen3-Omni: spoken answers whose frames are groups of codes.

[Note: inputs of this talker] The talker predicts the first code of a frame, and its code predictor the others. As in
transformers' `generate`: for the user's turns, the talker gets the thinker's embeddings of the text and, in place of
files, its states at one layer, each through a projection. Nine marks open the answer, and include its first token. From
then on, each step adds the embeddings of all codes of the previous frame to the next token of the answer, and after its
end, to a mark for that, and then to padding. The code predictor gets the talker's state that predicted the first code,
that code, and then one code after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.models.media.speech import IGNORE, answer_of, padded, places_of

if TYPE_CHECKING:
    import torch

MARKS = 9  # places that open the answer


def codes_loss(model: Any, inputs: dict[str, Any], states: Any, codes: torch.Tensor) -> torch.Tensor:
    """The loss of Qwen3-Omni's talker, from the thinker's states."""
    import torch

    accepted = states[model.config.talker_config.accept_hidden_layer]
    places = places_of(model, inputs)
    spoken = [(i, row[row[:, 0] != IGNORE]) for i, row in enumerate(codes) if bool(row.ne(IGNORE).any())]
    rows = [_row(model, states[0][i], accepted[i], inputs, i, places[:, i], row) for i, row in spoken]
    length = max(len(given) for given, _ in rows)
    given = torch.stack([padded(given, length) for given, _ in rows])
    mask = torch.stack([padded(given.new_ones(len(g), dtype=torch.int64), length) for g, _ in rows])
    positions = torch.stack([padded(where.T, length).T for _, where in rows], dim=1)  # (3, rows, length)
    out = model.talker(inputs_embeds=given, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    said, heard = [], []  # logits of first codes, and the states they were predicted from
    for k, (_, row) in enumerate(spoken):
        first = len(rows[k][0]) - len(row) - 1
        said.append(out.logits[k, first : first + len(row) + 1])
        heard.append(out.hidden_states[0][-1][k, first : first + len(row)])
    end = codes.new_tensor([model.config.talker_config.codec_eos_token_id])
    targets = torch.cat([torch.cat([row[:, 0], end]) for _, row in spoken])
    total = torch.nn.functional.cross_entropy(torch.cat(said), targets, reduction="sum")
    frames = torch.cat([row for _, row in spoken])
    total = total + _rest_loss(model.talker, torch.cat(heard), frames)
    items = inputs.get("num_items_in_batch")
    return total / (targets.numel() + frames[:, 1:].numel() if items is None else items)


def _rest_loss(talker: Any, heard: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """The summed loss of all codes but the first.

    Args:
        heard: the talker's states, (frames, width).
        frames: codes, (frames, groups).
    """
    import torch

    predictor = talker.code_predictor
    given = [heard, talker.get_input_embeddings()(frames[:, 0])]
    given += [embed(frames[:, g + 1]) for g, embed in enumerate(predictor.get_input_embeddings()[:-1])]
    states = predictor.model(inputs_embeds=torch.stack(given, dim=1), use_cache=False).last_hidden_state
    losses = [
        torch.nn.functional.cross_entropy(head(states[:, g + 1]), frames[:, g + 1], reduction="sum")
        for g, head in enumerate(predictor.lm_head)
    ]
    return torch.stack(losses).sum()


def _row(
    model: Any,
    embedded: torch.Tensor,
    accepted: torch.Tensor,
    inputs: dict[str, Any],
    i: int,
    places: torch.Tensor,
    codes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The talker's inputs for one row (length, width), and the places (3, length). See [Note: inputs of this talker].

    Args:
        embedded, accepted: the thinker's embeddings and states for the row, (length, width).
        codes: (frames, groups).
    """
    import torch

    talker, config = model.talker, model.config
    ids = inputs["input_ids"][i]
    start, end = answer_of(inputs["labels"][i])
    asked = _asked(config, ids[:start])
    words = talker.text_projection(embedded)
    question = torch.where(_are_files(config, ids).unsqueeze(-1), talker.hidden_projection(accepted), words)[:start]
    marks = torch.tensor([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id], device=ids.device)
    begin, done, pad = talker.text_projection(model.thinker.get_input_embeddings()(marks)).split(1)
    opened = int((ids[:start] == config.im_start_token_id).nonzero().max())
    answer = words[opened : end - 1]  # without the token that ends the turn
    text = torch.cat([answer[:3], pad.expand(4, -1), begin, answer[3:4]])
    text = torch.cat([torch.zeros_like(text[:3]), talker.get_input_embeddings()(_codec_marks(config, ids))]) + text
    said = torch.cat([answer[4:], done])[: len(codes)]
    said = torch.cat([said, pad.expand(len(codes) - len(said), -1)])
    given = torch.cat([question[asked], text, said + _frames(talker, codes)])
    where = _packed(places[:, :start], asked)
    after = (where.max() + 1 if where.numel() else 0) + torch.arange(MARKS + len(codes), device=ids.device)
    return given, torch.cat([where, after.expand(3, -1)], dim=1)


def _frames(talker: Any, codes: torch.Tensor) -> torch.Tensor:
    """The sum of the embeddings of all codes of a frame: (frames, width)."""
    others = talker.code_predictor.get_input_embeddings()
    added = talker.get_input_embeddings()(codes[:, 0])
    for g, embed in enumerate(others):
        added = added + embed(codes[:, g + 1])
    return added


def _asked(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Which tokens are in turns of the user, including marks: bool of shape (length,)."""
    import torch

    places = torch.arange(len(ids), device=ids.device)
    turn = torch.where(ids == config.im_start_token_id, places, -1).cummax(0).values
    role = ids[(turn.clamp(min=0) + 1).clamp(max=len(ids) - 1)]
    return role == config.user_token_id


def _packed(places: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Places of the user's turns (3, tokens), as if nothing were between them."""
    import torch

    turns, begin = [], 0
    starts = asked & ~torch.cat([asked.new_zeros(1), asked[:-1]])
    number = starts.cumsum(0)
    for n in range(1, int(starts.sum()) + 1):
        turn = places[:, asked & (number == n)]
        turns.append(turn - turn[:, :1] + begin)
        begin = int(turns[-1].max()) + 1
    return torch.cat(turns, dim=1) if turns else places[:, :0]


def _are_files(config: Any, ids: torch.Tensor) -> torch.Tensor:
    thinker = config.thinker_config
    return (ids == thinker.audio_token_id) | (ids == thinker.image_token_id) | (ids == thinker.video_token_id)


def _codec_marks(config: Any, like: torch.Tensor) -> torch.Tensor:
    """The marks for no thinking, for the model's first voice, and for the start of speech."""
    talker = config.talker_config
    voice = next(iter((talker.speaker_id or {}).values()), talker.codec_pad_id)
    thought = (talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id)
    return like.new_tensor([*thought, voice, talker.codec_pad_id, talker.codec_bos_id])
