"""Rows with files for a model with a processor: encoded once as a check, and again whenever they are trained on.

[Note: twice] The tensors of an image are large, and only the processor knows how many tokens it takes. So before
training every row goes through the processor once: this finds bad files and keeps lengths and labels, but not tensors.
In training, workers read and process the same rows again, a batch at a time. Rows without files are handled the same
way, but give no image or audio tensors: the towers are then not run at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from inspect import Parameter, signature
from typing import Any

from shardproof.data.encoding.dated import on_day
from shardproof.data.encoding.encode import Encoder, Learnt
from shardproof.data.encoding.learnt import Spans, labels_of
from shardproof.data.encoding.report import Labelled
from shardproof.data.encoding.seen import Seen, refusals
from shardproof.data.encoding.weights import Weights
from shardproof.data.forms.parts import KINDS, Problem, parts_of, placeholders, refusal, shown, text_of
from shardproof.data.media.grounding import Grounded
from shardproof.data.media.hearing import Hearing
from shardproof.data.media.limits import Limits
from shardproof.data.media.made import after_replacement, as_taken, check_seen, for_a_model, listed, share_names
from shardproof.data.media.reading import Frames, files_of
from shardproof.data.rows import BadRows, Row
from shardproof.errors import ConfigError, DataError
from shardproof.models.loading.processors import writes_more

# The processors' argument for the files of each kind.
_NAMES = {"image": "images", "audio": "audio", "video": "videos"}
_COMPLETES = "return_for_text_completion"  # Chameleon's option; without it, a separator is added after every text
_SECONDS = "video_second_per_grid"  # output of the Omni processors: seconds between patches, for each video


class MediaEncoder:
    """Rows through a model's chat template and processor.

    Args:
        processor: a transformers processor, with the model's chat template on its tokenizer.
        limits: limits for reading files.
        loss, system, bad_rows, weights: as for `encode_rows`.
    """

    def __init__(
        self,
        processor: Any,
        limits: Limits,
        *,
        loss: Learnt = "answer",
        system: str | None = None,
        bad_rows: BadRows = "stop",
        weights: Sequence[Weights] = (),
    ) -> None:
        self.processor, self.limits = processor, limits
        self._encoder = Encoder(processor.tokenizer, loss, system, bad_rows, weights)
        written = getattr(processor.tokenizer, "chat_template", None)
        dated = on_day(written, self._encoder.day) != written  # the rows differ from day to day
        self.options: dict[str, Any] = {"loss": loss, "system": system}
        self.options |= {"day": str(self._encoder.day) if dated else None, "weights": [*map(asdict, weights)]}
        # In texts for Qianfan-OCR, an image's placeholder differs from the token it becomes.
        tokens = {
            k: getattr(processor, f"{k}_placeholder_token", getattr(processor, f"{k}_token", None)) for k in KINDS
        }
        self.tokens = {kind: str(token) for kind, token in tokens.items() if token is not None}  # by kind
        self._objects = Grounded(processor)
        self._hearing = Hearing(self._of_sound, limits.sampling_rate, limits.max_seconds)

    @cached_property
    def _made(self) -> list[str]:
        """The tokens of files that texts must not contain: the processor puts them in place of another placeholder
        (Gemma 3)."""
        own = [
            getattr(of, f"{k}_token", None) for k in self.tokens for of in (self.processor, self.processor.tokenizer)
        ]
        return [str(token) for token in own if token and not any(str(token) in mark for mark in self.tokens.values())]

    @property
    def seen(self) -> Seen:
        """Checks on what the chat template writes."""
        return self._encoder.seen

    @property
    def takes(self) -> list[str]:
        """The kinds of files that the model takes."""
        return list(self.tokens)

    def text(self, row: Row) -> tuple[str, Any]:
        """The text of a row from the chat template, and the spans of its answers; a plain prompt gets placeholders for
        its files."""
        marked = self._marked if row.kind == "text" else self.known
        shown = replace(row, messages=[{**m, "content": marked(m["content"])} for m in row.messages])
        text, spans = self._encoder.text(shown)
        begun = self._begun(text)
        more = len(begun) - len(text)
        return begun, [(start + more, end + more, *weight) for start, end, *weight in spans]

    def labelled(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[Labelled]:
        """Token ids and labels for the results of `text`, with the placeholders of files taken as text."""
        return self._encoder.labelled(texts)

    def _text_with(self, row: Row, files: Mapping[str, list[Any]]) -> tuple[str, Spans]:
        """Like `text`, with the objects of its images filled in."""
        return self.text(replace(row, messages=self._objects.filled(row.messages, files["image"])))

    def _begun(self, text: str) -> str:
        """The text with its beginning token in front, which templates may leave out."""
        return text if text.lstrip().startswith(self._begin) else self._begin + text

    @cached_property
    def _begin(self) -> str:
        """The special token that the tokenizer, or else the processor itself (Molmo 2's), puts before a text."""
        if getattr(self.processor, "begins_texts", False):
            return ""
        if begin := self._encoder.begin_of_text or getattr(self.processor, "begins_with", ""):
            return str(begin)
        tokenizer = self.processor.tokenizer
        alone, made = (_ids_of(of, "a") for of in (tokenizer, self.processor))
        added, rest = made[: len(made) - len(alone)], made[len(made) - len(alone) :]
        is_begin = rest == alone and set(added) <= set(tokenizer.all_special_ids)
        return str(tokenizer.decode(added)) if is_begin else ""

    def known(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The content of a turn for the chat template: files that the template has no placeholder for become tokens."""
        if isinstance(content, str):
            return content
        parts = [p if p["type"] in ("text", *self._templated) else self._as_text(p["type"]) for p in content]
        return parts if any(p["type"] != "text" for p in parts) else "".join(part["text"] for part in parts)

    def shown(self, turns: Sequence[Mapping[str, Any]], files: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
        """The turns of a row for the chat template."""
        filled = self._objects.filled(turns, files["image"])
        return [{**turn, "content": self.known(turn["content"])} for turn in filled]

    def _as_text(self, kind: str) -> dict[str, Any]:
        return {"type": "text", "text": self.tokens.get(kind, "")}

    @cached_property
    def _templated(self) -> list[str]:
        """The kinds of files that the chat template has placeholders for."""
        return [kind for kind, token in self.tokens.items() if self._encoder.template.knows(kind, token)]

    def _marked(self, content: str | list[dict[str, Any]]) -> str:
        """A text without a template. Files get the placeholders that the model's template uses in a question, or else
        their tokens."""
        if isinstance(content, str):
            return content
        kinds = [part["type"] for part in content if part["type"] in self.tokens]
        marks = self._encoder.template.marks(kinds) if self.processor.tokenizer.chat_template else None
        if marks is None or any(self.tokens[kind] not in mark for kind, mark in zip(kinds, marks, strict=True)):
            marks = [self.tokens[kind] for kind in kinds]
        left = iter(marks)
        return "".join(part["text"] if part["type"] == "text" else next(left, "") for part in content)

    def files(self, row: Row) -> dict[str, list[Any]]:
        """The files of a row, decoded.

        Raises:
            Problem: one of them cannot be used, or the model takes none of its kind.
        """
        for part in parts_of(row.messages):
            if part["type"] not in self.takes:
                taken = f"the model takes {', '.join(self.takes)}"
                marks = f"{type(self.processor).__name__} has no token for one in a text"
                raise Problem(f"it has a file of type {part['type']}, but {taken if self.takes else marks}")
        files = files_of(row, self.limits)
        for message in row.messages:
            lost = [kind for kind in placeholders(_only_text(message)) if kind in self.takes and not files[kind]]
            if lost and message["role"] != "assistant":
                raise Problem(f"the text contains <{lost[0]}>, but the row names no {lost[0]}")
        return files

    def filled(self, row: Row) -> list[dict[str, Any]]:
        """The turns of a row with its objects written into their texts. Also raises Problem like `files`."""
        return self._objects.filled(row.messages, self.files(row)["image"])

    def heard(self, row: Row) -> dict[str, list[Any]]:
        """The files of a row. Raises Problem like `files`, and for audio whose end the model does not hear."""
        files = self.files(row)
        self.check_heard([part["audio"] for part in parts_of(row.messages) if part["type"] == "audio"], files["audio"])
        return files

    def check_heard(self, names: Sequence[str], sounds: Sequence[Any]) -> None:
        """Raise Problem for the first of these audio files whose end the model does not hear."""
        for number, (name, sound) in enumerate(zip(names, sounds, strict=True), 1):
            try:
                self._hearing.check(len(sound))
            except Problem as problem:
                raise Problem(f"audio {number} ({shown(name)}): {problem}") from None

    def _of_sound(self, sound: Any) -> Any:
        """The processor's output for audio, float32 of shape (samples,), without text."""
        files: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        files["audio"] = [sound]
        return self.process([self.tokens["audio"]], [files], return_tensors="pt", text_kwargs={"padding": False})

    def encode(self, row: Row) -> Labelled:
        """Token ids (including those of the files), labels, and weights, if any.

        Raises:
            Problem: a file cannot be used, or the template has no place for it.
            ConfigError: the processor's changes to texts cannot be traced.
        """
        files = self.heard(row)
        text, spans = self._text_with(row, files)
        out = self.process(
            [text],
            [files],
            return_text_replacement_offsets=True,
            # Some processors cannot return texts as lists.
            text_kwargs={"return_offsets_mapping": True, "padding": False, "return_tensors": "pt"},
        )
        ids = listed(out["input_ids"][0])
        replaced = out.get("text_replacement_offsets")
        if replaced is None:
            return ids, *self._labels_by_beginnings(ids, text, spans, files)
        check_seen(replaced[0])
        grown, moved = after_replacement(text, spans, replaced[0])
        self._check_followed(text, grown, replaced[0], ids)
        return ids, *labels_of(ids, listed(out["offset_mapping"][0]), moved, grown)

    def _check_followed(self, text: str, grown: str, replaced: Sequence[Any], ids: list[int]) -> None:
        """Raise ConfigError for a processor that changes more of a text than it reports: positions would then differ
        between our text and its own, and tokens outside the answer would be learned."""
        marked = all(text[slice(*change["span"])] == change["text"] for change in replaced)
        tokenizer = self.processor.tokenizer
        if not marked or tokenizer(grown, add_special_tokens=False, verbose=False)["input_ids"] != ids:
            raise ConfigError(writes_more(type(self.processor).__name__))

    def _labels_by_beginnings(
        self, ids: list[int], text: str, spans: Spans, files: Mapping[str, list[Any]]
    ) -> tuple[list[Any], ...]:
        """Labels for a processor that does not report its replacements: the start and end of an answer are found by
        tokenising the text before them. A token that begins before the answer is not part of it, as in `labels_of`."""

        def before(end: int) -> int:
            some = {kind: files[kind][: text[:end].count(token)] for kind, token in self.tokens.items()}
            first = self.process([text[:end]], [some], text_kwargs={"padding": False})["input_ids"][0] if end else []
            same = next((i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), len(first))
            return same + (same < len(first))  # the token where they diverge begins before `end`

        places = {at: before(at) for start, end, *_ in spans for at in (start, end)}
        found: Any = [(places[start], places[end], *weight) for start, end, *weight in spans]
        return labels_of(ids, [(i, i + 1) for i in range(len(ids))], found, " ")

    def question(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Any = None) -> dict[str, Any]:
        """The tensors for prompting a model; relative paths start from the folder of the file `where`, and `tools` are
        passed to the template.

        Raises:
            DataError: a file cannot be used.
        """
        row = Row([dict(message) for message in messages], where, 0)
        try:
            return self.asked([self.seen.in_its_words(messages)], [self.heard(row)], tools=tools)
        except Problem as problem:
            raise DataError(str(problem)) from None

    def batch(self, rows: Sequence[Row], files: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
        """The tensors of some rows: `input_ids` and `attention_mask` of shape (rows, length), padded on the right, and
        the tensors of their files."""
        texts = [self._text_with(row, of_row)[0] for row, of_row in zip(rows, files, strict=True)]
        out = self.process(texts, files, return_tensors="pt", text_kwargs={"padding": True, "padding_side": "right"})
        return dict(out)

    def given(self, files: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
        """The processor's arguments besides texts, for the files of some rows."""
        flat = {_NAMES[kind]: [file for row in files for file in row[kind]] for kind in self.takes}
        given: dict[str, Any] = {name: values for name, values in flat.items() if values}
        # Qwen3-ASR's processor has a required argument for audio, even if there is none.
        wanted = signature(type(self.processor).__call__).parameters
        missing = [name for name in flat if name in wanted and name not in given]
        nothing = {name: None for name in missing if wanted[name].default is Parameter.empty}
        if "audio" in given:
            given["audio_kwargs"] = {"sampling_rate": self.limits.sampling_rate}
        if "videos" in given:
            part = getattr(self.processor, "video_processor", None)
            least = getattr(part, "temporal_patch_size", 1)  # some refuse fewer frames than a patch has
            given["videos"] = [video.of_at_least(least) for video in given["videos"]]
            given["videos_kwargs"] = as_taken(given["videos"], part)
            if (getattr(self.processor, "videos_kwargs", None) or {}).get("do_resize") is False:
                given["videos_kwargs"]["do_resize"] = True  # MiniMax M3's leaves it to the code that reads frames
        # Grouped by row: some processors need this to tell rows apart. GOT-OCR2's would take a group as one image in
        # pages.
        if "images" in given and not hasattr(self.processor, "multi_page"):
            given["images"] = [row["image"] for row in files]
        return given | nothing

    def asked(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        files: Sequence[dict[str, list[Any]]],
        answered: bool = False,
        tools: Any = None,
    ) -> dict[str, Any]:
        """The tensors of conversations up to where an answer would begin, padded on the left, or, if `answered`, of
        full conversations, padded on the right; all have these `tools`. Raises Problem if the template or the processor
        refuses one."""
        shown = [self.shown(turns, of_row) for turns, of_row in zip(conversations, files, strict=True)]
        with refusals():
            render = partial(self._encoder.template.render, prompt=not answered, tools=tools)
            texts = [self._begun(render(turns)) for turns in shown]
        how = {"padding": True, "padding_side": "right" if answered else "left"}
        return dict(self.process(texts, files, return_tensors="pt", text_kwargs=how))

    def process(self, texts: list[str], files: Sequence[dict[str, list[Any]]], **options: Any) -> Any:
        """The processor's output for texts with files. Raises Problem if it refuses them, or if a text contains a token
        that stands for a file: the model would expect another file."""
        if token := next((token for token in self._made for text in texts if token in text), None):
            raise Problem(f"{token} is in the text, but is a token for files: write it differently")
        text_options = {**options.pop("text_kwargs"), "add_special_tokens": False}
        if "return_tensors" not in options:  # for texts; some processors count tokens only if files are tensors
            options |= {f"{name}_kwargs": {"return_tensors": "pt"} for name in _NAMES.values()}
        given = self.given(files)
        options |= {
            name: {**options.get(name, {}), **given.pop(name)} for name in list(given) if name.endswith("_kwargs")
        }
        if "images" in given and "videos" in given and share_names(self.processor):
            raise Problem(f"{type(self.processor).__name__} does not take images and videos in one row")
        if hasattr(self.processor, _COMPLETES):
            options[_COMPLETES] = True
        try:
            made = self.processor(text=list(texts), **given, text_kwargs=text_options, **options)
        except Exception as error:
            raise refusal(self.processor, error) from error
        return self._timed(for_a_model(made), given.get("videos") or [])

    def _timed(self, made: Any, videos: Sequence[Frames]) -> Any:
        """The processor's output, with the seconds between patches set for each video: the Omni processors use a single
        rate for all videos. Their values are kept if the times of the frames are unknown."""
        if _SECONDS in made:
            depth = self.processor.video_processor.temporal_patch_size
            for number, video in enumerate(videos):
                if (known := video.metadata)["duration"]:
                    made[_SECONDS][number] = depth * known["duration"] / len(video)
        return made

    def length(
        self, row: Row, conversation: Sequence[Mapping[str, Any]], files: dict[str, list[Any]], prompt: bool
    ) -> int:
        """The number of tokens of a row's conversation, including those of its files; raises Problem if it is
        refused."""
        shown = self.shown(conversation, files)
        with refusals():
            self._encoder.seen.check(row, shown)
            text = self._begun(self._encoder.template.render(shown, prompt=prompt))
        return len(self.process([text], [files], text_kwargs={"padding": False})["input_ids"][0])


def _only_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else text_of([part for part in content if part["type"] == "text"])


def _ids_of(processing: Any, text: str) -> list[int]:
    """The ids that a tokenizer or a processor gives for a text without files; empty if it refuses that, in which case
    real calls report the error."""
    try:
        return listed(processing(text=[text], add_special_tokens=False)["input_ids"][0])
    except Exception:
        return []
