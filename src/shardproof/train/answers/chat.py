"""Chat with a trained model: load a run folder, answer messages."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.agents import goes_on
from shardproof.data.encoding.encode import begin_of_text
from shardproof.data.encoding.seen import Seen
from shardproof.data.encoding.template import Template, set_template
from shardproof.data.forms.objects import PLACED
from shardproof.data.forms.parts import Problem, parts_of
from shardproof.data.rows import Row
from shardproof.errors import ConfigError, DataError
from shardproof.models.families.known import family_of
from shardproof.models.forward import without_adapters
from shardproof.plugins import Plugins
from shardproof.train.answers.loaded import Loaded
from shardproof.train.answers.sampling import Sampling
from shardproof.train.answers.writing import Writer
from shardproof.train.model.loading import causal_lm
from shardproof.train.model.reward_models import judges
from shardproof.train.options.config import RunConfig, SftConfig
from shardproof.train.rows.media import media_limits

if TYPE_CHECKING:
    from shardproof.data.media.encode import MediaEncoder

log = logging.getLogger("shardproof")


@dataclass
class Question:
    """A question: turns, of which the last one asks.

    Attributes:
        plain: its text is continued as it is, without a template.
        where: the file that the paths of its files are relative to; empty if they are absolute.
        tools: tools that the template shows.
    """

    messages: Sequence[Mapping[str, Any]]
    plain: bool = False
    where: str = ""
    tools: list[Any] | None = None


class Chat(Loaded):
    """A model that answers.

    Args:
        template, variables: used instead of the tokenizer's own, see `set_template`.
        plain: the user's text is continued as it is, without a template.
        plugins, model_type: a plugin that loads the model instead of transformers, see `registered_model`.
        stage: as for `Loaded`.
        media: a configuration with the options for files. Default: the defaults of `sft`.

    Raises:
        ConfigError: something cannot be loaded, or the tokenizer has no chat template and neither `template` nor
            `plain` is given.
    """

    def __init__(
        self,
        folder: Path,
        trust_remote_code: bool = False,
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
        plain: bool = False,
        plugins: Plugins | None = None,
        model_type: str | None = None,
        stage: int | None = None,
        media: RunConfig | None = None,
        *,
        agent: str | None = None,
        prefix: str = "",
    ) -> None:
        if judges(folder):
            raise ConfigError(
                f"The model in {folder} scores answers and cannot generate them. Use it as --reward-model of rlhf."
            )
        super().__init__(folder, partial(causal_lm, plugins=plugins, model_type=model_type), trust_remote_code, stage)
        self.plain, self._media, self.prefix = plain, media or SftConfig(), prefix
        set_template(self.processing, template, variables, agent, prefix)
        if not plain and not self.tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {folder} has no chat template.\n"
                "Give one with --chat-template ('chatml', a file or the template itself), or add --plain to continue"
                " the prompt as it is."
            )
        self.load()
        self._writer = self._begin(f"the model in {folder}")
        self.place_model()

    def _begin(self, named: str) -> Any:
        """The object that generates; `named`: the name of the model in messages."""
        return Writer(self.model, self.tokenizer, named, self.first)

    @property
    def _device(self) -> Any:
        """The device for the model's inputs."""
        return self.model.device

    @property
    def written(self) -> str:
        """The last answer as it was generated, with special tokens."""
        return self._writer.written

    def stream(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> Iterator[str]:
        """The answer in pieces, as they are generated."""
        from transformers import TextIteratorStreamer

        from shardproof.integrations.transformers import together

        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        failures: list[BaseException] = []
        enough = Event()

        def work() -> None:
            try:
                with together(self.model):
                    inputs = self._inputs([Question(messages, self.plain)])
                    self._writer.write(inputs, sampling, self.plain, streamer, enough)
            except BaseException as error:
                failures.append(error)
                streamer.end()

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            if self.prefix:
                yield self.prefix
            yield from sampling.shown(streamer)
        finally:  # generation stops when the caller stops iterating
            enough.set()
            thread.join()
        if failures:
            raise failures[0]

    def check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError or DataError for messages that `answer` would refuse before it generates anything."""
        self._writer.room(self._inputs([Question(messages, self.plain)])["input_ids"].shape[1], 1)

    @property
    def limited(self) -> bool:
        """Whether a question may be too long."""
        return self._writer.limit is not None

    def problem(self, question: Question) -> str | None:
        """Why a question cannot be asked: a file cannot be used, or there is no room for an answer."""
        try:
            return self._writer.lacks_room(len(self._read([question])["input_ids"][0]))
        except DataError as error:
            return str(error)

    def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> str:
        """The complete answer."""
        return self.answers([Question(messages, self.plain)], sampling)[0]

    def answers(self, questions: Sequence[Question], sampling: Sampling) -> list[str]:
        """Answers to several questions; those with text only are asked at once. With several ranks, all call this, with
        their own questions or none."""
        from shardproof.integrations.transformers import together

        found: dict[int, str] = {}
        with together(self.model):
            for group in self._alike(questions):
                alike = [questions[i] for i in group]
                tokens = self._writer.write(self._inputs(alike), sampling, alike[0].plain)
                found.update(zip(group, self._writer.texts(tokens, sampling), strict=True))
        return [self.prefix + found[i] for i in range(len(questions))]

    def _alike(self, questions: Sequence[Question]) -> list[list[int]]:
        """The questions that a model can be asked at once, in groups."""
        if self.processing is not self.tokenizer:
            return [[i] for i in range(len(questions))]
        groups = [[i for i, question in enumerate(questions) if question.plain == plain] for plain in (True, False)]
        return [group for group in groups if group]

    @cached_property
    def _of_rows(self) -> MediaEncoder:
        from shardproof.data.media.encode import MediaEncoder

        return MediaEncoder(self.processing, media_limits(self._media, self.processing))

    @cached_property
    def _of_user(self) -> MediaEncoder:
        """An encoder for files that the user names, which may be anywhere on this machine."""
        from shardproof.data.media.encode import MediaEncoder

        limits = media_limits(self._media, self.processing)
        return MediaEncoder(self.processing, replace(limits, root=Path("/")))

    def takes_files(self, question: Question) -> bool:
        """Whether the model's processor makes the inputs for this question."""
        return self.processing is not self.tokenizer and not question.plain

    def with_files(self, question: Question) -> dict[str, Any]:
        """The output of the model's processor for a question. Raises DataError for a file that cannot be used."""
        encoder = self._of_rows if question.where else self._of_user
        found = encoder.question(question.messages, question.where, question.tools)
        family = family_of(self.model.config)
        if family is not None and family.takes_data:  # including lists with an element per row
            return found
        taken = inspect.signature(without_adapters(self.model).forward).parameters  # some lists are arguments as well
        return {name: value for name, value in found.items() if hasattr(value, "to") or name in taken}

    def filled(self, turns: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """The turns of a row of the file `where`, with its objects written into their texts as the model does.

        Raises:
            DataError: they cannot be written.
        """
        if not any(PLACED in turn for turn in turns):
            return list(turns)
        try:
            return self._of_rows.filled(Row(list(turns), where, 0))
        except Problem as problem:
            raise DataError(str(problem)) from None

    def _turns(self, question: Question) -> Sequence[Mapping[str, Any]]:
        """The turns of a question, as the chat template expects them. Warns once if it ignores system messages."""
        if self._seen is None:
            return question.messages
        turns = self._seen.in_its_words(question.messages)
        if turns[0]["role"] == "system" and not self._seen.takes_system:
            self._writer.tell("The chat template ignores system messages, so the model does not see the one given.")
        return turns

    @cached_property
    def _seen(self) -> Seen | None:
        with contextlib.suppress(ConfigError):  # a template that only renders questions
            return Seen(Template(self.tokenizer))
        return None

    def _asked(self, turns: Sequence[Mapping[str, Any]], tools: Any) -> str:
        """The text of a question in the model's chat template. If an answer continues after a tool result, the text
        ends there."""
        if goes_on(self.tokenizer.chat_template):
            opened = self.prefix if turns[-1]["role"] == "tool" else ""  # otherwise the template adds it
            return Template(self.tokenizer).render(turns, prompt=True, tools=tools) + opened
        text: str = self.tokenizer.apply_chat_template(
            list(turns), tools=tools, add_generation_prompt=True, tokenize=False
        )
        return text

    def _inputs(self, questions: Sequence[Question]) -> Any:
        """The model's inputs for similar questions, on its device."""
        return self._read(questions).to(self._device)

    def _read(self, questions: Sequence[Question]) -> Any:
        """The output of the tokenizer or processor for similar questions, padded on the left."""
        from transformers import BatchFeature

        if self.takes_files(questions[0]):
            return BatchFeature(self.with_files(questions[0]))
        if kind := next((part["type"] for question in questions for part in parts_of(question.messages)), None):
            what = "this model takes" if self.processing is self.tokenizer else "a prompt that is continued can be"
            raise ConfigError(f"The prompt has a file of type {kind}, but {what} text only.")
        if questions[0].plain:
            begin = begin_of_text(self.tokenizer)  # which the tokenizer adds itself
            texts = [question.messages[-1]["content"].removeprefix(begin) + self.prefix for question in questions]
        else:
            texts = [self._asked(self._turns(question), question.tools) for question in questions]
        padding: dict[str, Any] = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        if padding and self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        return self.tokenizer(texts, return_tensors="pt", add_special_tokens=questions[0].plain, **padding)
