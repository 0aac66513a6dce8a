"""Talk to a trained model: load a run folder, answer messages."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from shardproof.data.encode import begin_of_text
from shardproof.data.objects import PLACED
from shardproof.data.parts import Problem, parts_of
from shardproof.data.rows import Row
from shardproof.data.seen import Seen
from shardproof.data.template import Template, set_template, stops
from shardproof.errors import ConfigError, DataError
from shardproof.models.families import family_of
from shardproof.plugins import Plugins
from shardproof.train.config import RunConfig, SftConfig
from shardproof.train.loaded import Loaded
from shardproof.train.media import media_limits
from shardproof.train.models import causal_lm, first_line
from shardproof.train.positions import learnt_positions, rotary_positions
from shardproof.train.reward_models import judges
from shardproof.train.sampling import Sampling

if TYPE_CHECKING:
    from shardproof.data.media_encode import MediaEncoder

log = logging.getLogger("shardproof")


@dataclass
class Question:
    """What is asked: turns, of which the last is a question.

    Attributes:
        plain: its text is continued as it stands, without a template.
        where: the file beside which the paths of its files begin; nothing where they are whole.
        tools: what the template shows besides.
    """

    messages: Sequence[Mapping[str, Any]]
    plain: bool = False
    where: str = ""
    tools: list[Any] | None = None


class Chat(Loaded):
    """A model that answers.

    Args:
        template, variables: in place of the tokenizer's own, as `set_template` takes them.
        plain: what the user says is continued as it stands, without a template.
        plugins, model_type: what may load the model in place of transformers, see `registered_model`.
        stage: as for `Loaded`.
        media: what its options about files say of those that are asked about. Default: what `sft` takes by default.

    Attributes:
        written: the last answer as it was generated, with special tokens.

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
    ) -> None:
        if judges(folder):
            raise ConfigError(
                f"The model in {folder} rewards answers, and writes none: rlhf takes it as --reward-model."
            )
        super().__init__(folder, partial(causal_lm, plugins=plugins, model_type=model_type), trust_remote_code, stage)
        self.plain, self._media = plain, media or SftConfig()
        set_template(self.processing, template, variables)
        if not plain and not self.tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {folder} has no chat template.\n"
                "Give one with --chat-template ('chatml', a file or the template itself), or add --plain, which has the"
                " prompt continued as it stands."
            )
        self.load()
        self._check_writes()
        known = getattr(getattr(self._inner, "generation_config", None), "eos_token_id", None)
        self._ends = {plain: stops(self.tokenizer, known, turns=not plain) for plain in (True, False)}  # where it stops
        self.written = ""
        self._told: set[str] = set()  # warnings
        self.place_model()

    def _check_writes(self) -> None:
        """What a model of the user's own may lack."""
        inner = self._inner
        if not callable(getattr(inner, "generate", None)):
            raise ConfigError(
                f"{type(inner).__name__} writes no answers: it has no generate(). Derive it from "
                "transformers.GenerationMixin, too."
            )
        # transformers' cache is one of layers, and asks the config how many there are.
        self.remembers = hasattr(inner.config.get_text_config(decoder=True), "num_hidden_layers")

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
                    self._generate([Question(messages, self.plain)], sampling, streamer, enough)
            except BaseException as error:
                failures.append(error)
                streamer.end()

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            yield from sampling.shown(streamer)
        finally:  # whoever stops listening stops the model
            enough.set()
            thread.join()
        if failures:
            raise failures[0]

    def check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError or DataError for what `answer` would refuse before anything is written."""
        self._room(self._inputs([Question(messages, self.plain)])["input_ids"].shape[1], 1)

    def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> str:
        """The whole answer."""
        return self.answers([Question(messages, self.plain)], sampling)[0]

    def answers(self, questions: Sequence[Question], sampling: Sampling) -> list[str]:
        """Answers to some questions: those of text at once. With several ranks all call it, with questions of their
        own, or none."""
        from shardproof.integrations.transformers import together

        found: dict[int, str] = {}
        with together(self.model):
            for group in self._alike(questions):
                prompt, tokens = self._generate([questions[i] for i in group], sampling, None)
                texts = self.tokenizer.batch_decode(tokens[:, prompt:], skip_special_tokens=True)
                found.update((i, sampling.ended(text).strip()) for i, text in zip(group, texts, strict=True))
        return [found[i] for i in range(len(questions))]

    def _alike(self, questions: Sequence[Question]) -> list[list[int]]:
        """Which of them a model can be asked at once."""
        if self.processing is not self.tokenizer:
            return [[i] for i in range(len(questions))]
        groups = [[i for i, question in enumerate(questions) if question.plain == plain] for plain in (True, False)]
        return [group for group in groups if group]

    @cached_property
    def _of_rows(self) -> MediaEncoder:
        from shardproof.data.media_encode import MediaEncoder

        return MediaEncoder(self.processing, media_limits(self._media, self.processing))

    @cached_property
    def _of_user(self) -> MediaEncoder:
        """Files that the user names on this machine may lie anywhere."""
        from shardproof.data.media_encode import MediaEncoder

        limits = media_limits(self._media, self.processing)
        return MediaEncoder(self.processing, replace(limits, root=Path("/")))

    def takes_files(self, question: Question) -> bool:
        """Whether the model's processor makes of it what the model is given."""
        return self.processing is not self.tokenizer and not question.plain

    def with_files(self, question: Question) -> dict[str, Any]:
        """What the model's processor makes of it. Raises DataError for a file that cannot be used."""
        encoder = self._of_rows if question.where else self._of_user
        found = encoder.question(question.messages, question.where, question.tools)
        family = family_of(self.model.config)
        if family is not None and family.takes_data:  # lists with an element for each row, too
            return found
        return {name: value for name, value in found.items() if hasattr(value, "to")}

    def filled(self, turns: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """The turns of a row of the file `where`, with its objects written into their texts as the model does.

        Raises:
            DataError: that cannot be done.
        """
        if not any(PLACED in turn for turn in turns):
            return list(turns)
        try:
            return self._of_rows.filled(Row(list(turns), where, 0))
        except Problem as problem:
            raise DataError(str(problem)) from None

    def _turns(self, question: Question) -> Sequence[Mapping[str, Any]]:
        """What is asked, in the words of the chat template. That it writes no system message is told once."""
        if self._seen is None:
            return question.messages
        turns = self._seen.in_its_words(question.messages)
        if turns[0]["role"] == "system" and not self._seen.takes_system:
            self._tell("The chat template writes no system message, so that the model does not see the one given.")
        return turns

    def _tell(self, warning: str) -> None:
        """Once, by one rank."""
        if self.first and warning not in self._told:
            self._told.add(warning)
            log.warning(warning)

    @cached_property
    def _seen(self) -> Seen | None:
        with contextlib.suppress(ConfigError):  # a template for questions alone
            return Seen(Template(self.tokenizer))
        return None

    def _inputs(self, questions: Sequence[Question]) -> Any:
        """What the model is given for questions that are alike, padded on the left."""
        from transformers import BatchFeature

        if self.takes_files(questions[0]):
            return BatchFeature(self.with_files(questions[0]))
        if kind := next((part["type"] for question in questions for part in parts_of(question.messages)), None):
            what = "this model takes" if self.processing is self.tokenizer else "what is continued as it stands is"
            raise ConfigError(f"There is a file of kind {kind}, and {what} text only.")
        if questions[0].plain:
            begin = begin_of_text(self.tokenizer)  # which it puts there by itself
            texts = [question.messages[-1]["content"].removeprefix(begin) for question in questions]
        else:
            texts = [
                self.tokenizer.apply_chat_template(
                    self._turns(question), tools=question.tools, add_generation_prompt=True, tokenize=False
                )
                for question in questions
            ]
        padding: dict[str, Any] = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        if padding and self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        return self.tokenizer(texts, return_tensors="pt", add_special_tokens=questions[0].plain, **padding)

    def _room(self, prompt: int, wanted: int) -> int:
        """How many tokens may be written behind a prompt of so many: a model that has learnt its positions has no more.

        Raises:
            ConfigError: none.
        """
        limit, made_for = learnt_positions(self._inner), rotary_positions(self._inner.config)
        if made_for is not None and prompt + wanted > made_for:
            self._tell(
                f"With --max-new-tokens {wanted} an answer may go beyond the {made_for} positions that the model in "
                f"{self.folder} is made for. What it writes there may make no sense."
            )
        if limit is None or prompt + wanted <= limit:
            return wanted
        if prompt >= limit:
            raise ConfigError(
                f"The question has {prompt} tokens, and the model in {self.folder} has learnt {limit} positions, and"
                " none beyond: there is no room for an answer. Ask something shorter."
            )
        return limit - prompt

    def _generate(
        self, questions: Sequence[Question], sampling: Sampling, streamer: Any, enough: Event | None = None
    ) -> tuple[int, Any]:
        """For questions that are alike: how many tokens they are, and these with the answers behind them."""
        import torch
        from transformers import StoppingCriteriaList

        def stopped(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(ids),), enough is not None and enough.is_set(), device=ids.device)

        inputs, plain = self._inputs(questions).to(self.model.device), questions[0].plain
        prompt = inputs["input_ids"].shape[1]
        choice = sampling.arguments(self.tokenizer)
        if not self.remembers:
            choice["use_cache"] = False
        if ends := self._ends[plain]:
            choice["eos_token_id"] = ends
        room = self._room(prompt, sampling.max_new_tokens)
        with self._told_plainly():
            tokens = self.model.generate(
                **inputs,
                max_new_tokens=room,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([stopped]),
                **choice,
            )
        if room < sampling.max_new_tokens and tokens.shape[1] == prompt + room:
            limit = prompt + room
            self._tell(f"An answer ends with the last of the {limit} positions that the model has learnt.")
        self._look_at(tokens[:, prompt:])
        return prompt, tokens

    def _look_at(self, tokens: Any) -> None:
        """Keep what was `written`, and tell of tokens, (rows, length), that the tokenizer makes nothing of."""
        self.written = self.tokenizer.decode(tokens[0])
        beyond = [one for one in dict.fromkeys(tokens.flatten().tolist()) if one >= len(self.tokenizer)]
        if unknown := [str(one) for one in beyond if not self.tokenizer.decode([one])]:
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            self.written = self.written or f"tokens {shown}, which its tokenizer does not have"
            self._tell(
                f"The model in {self.folder} writes tokens that its tokenizer does not have, which are left out: the "
                "tokenizer is that of another model, or the model has learnt little."
            )

    @contextlib.contextmanager
    def _told_plainly(self) -> Iterator[None]:
        """Of a model whose code is not transformers', say what it lacks for generate()."""
        kind = type(self._inner)
        try:
            yield
        except (AttributeError, TypeError, NotImplementedError) as error:
            if kind.__module__.partition(".")[0] == "transformers":
                raise
            frames, file = (
                traceback.extract_tb(error.__traceback__),
                getattr(sys.modules[kind.__module__], "__file__", ""),
            )
            place = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
            raise ConfigError(
                f"{kind.__name__} cannot be asked by transformers' generate(): {first_line(error)} ({place.filename}, "
                f"line {place.lineno})."
            ) from error
