"""Text generation with transformers' generate(): ends of answers, limits on their length, and warnings."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.template import stops
from shardproof.errors import ConfigError
from shardproof.models.forward import without_adapters
from shardproof.train.model.loading import first_line
from shardproof.train.model.positions import learnt_positions, rotary_positions

if TYPE_CHECKING:
    from shardproof.train.answers.sampling import Sampling

log = logging.getLogger("shardproof")

SOME = 16  # tokens, enough to see whether a model reads padding


class Tells:
    """Warnings about answers, and decoding.

    Args:
        tokenizer: the model's own.
        named: the name of the model in messages.
        tells: whether this process shows warnings.

    Attributes:
        limit: how many tokens a question and its answer may have; None for any number.
        written: the last answer as it was generated, with special tokens.
    """

    limit: int | None = None

    def __init__(self, tokenizer: Any, named: str, tells: bool) -> None:
        self.tokenizer, self.named, self._tells = tokenizer, named, tells
        self.written = ""
        self._told: set[str] = set()  # warnings

    def tell(self, warning: str) -> None:
        """Show a warning once, from one process."""
        if self._tells and warning not in self._told:
            self._told.add(warning)
            log.warning(warning)

    def lacks_room(self, prompt: int) -> str | None:
        """Why there is no room for an answer after a question of `prompt` tokens, or None if there is."""
        if self.limit is None or prompt < self.limit:
            return None
        return f"the question has {prompt} tokens, and {self._of_limit()}: there is no room for an answer"

    def _of_limit(self) -> str:
        raise NotImplementedError

    def texts(self, tokens: Any, sampling: Sampling) -> list[str]:
        """The answers from `write`, as text."""
        decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [sampling.ended(text).strip() for text in decoded]

    def _look_at(self, tokens: Sequence[Sequence[int]]) -> None:
        """Keep what was `written`, and warn about tokens, given per row, that the tokenizer cannot decode."""
        self.written = self.tokenizer.decode(tokens[0])
        beyond = [one for one in dict.fromkeys(chain(*tokens)) if one >= len(self.tokenizer)]
        if unknown := [str(one) for one in beyond if not self.tokenizer.decode([one])]:
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            self.written = self.written or f"tokens {shown}, which its tokenizer does not have"
            self.tell(
                f"{self.named[:1].upper()}{self.named[1:]} generates tokens that its tokenizer does not have, which"
                " are left out: the tokenizer belongs to another model, or the model has learned little."
            )


class Writer(Tells):
    """Generates answers after the tokens of questions.

    Args:
        model: a transformers model, sharded or not, with adapters or without.
        tokenizer, named, tells: as for `Tells`.

    Raises:
        ConfigError: the model has no generate().
    """

    def __init__(self, model: Any, tokenizer: Any, named: str, tells: bool) -> None:
        super().__init__(tokenizer, named, tells)
        self.model = model
        self._inner = without_adapters(model)
        if not callable(getattr(self._inner, "generate", None)):
            raise ConfigError(
                f"{type(self._inner).__name__} cannot generate: it has no generate(). Derive it from"
                f" transformers.GenerationMixin as well."
            )
        # The cache in transformers is per layer, and reads their number from the config.
        self.remembers = hasattr(self._inner.config.get_text_config(decoder=True), "num_hidden_layers")
        known = getattr(getattr(self._inner, "generation_config", None), "eos_token_id", None)
        self._ends = {plain: stops(tokenizer, known, turns=not plain) for plain in (True, False)}
        self.limit = learnt_positions(self._inner)
        self._reads: bool | None = None  # whether it reads padding, if known

    def _of_limit(self) -> str:
        return f"{self.named} has learned only {self.limit} positions"

    def room(self, prompt: int, wanted: int) -> int:
        """How many tokens may be generated after a prompt of `prompt` tokens: learned positions are limited.

        Raises:
            ConfigError: none.
        """
        limit, made_for = self.limit, rotary_positions(self._inner.config)
        if made_for is not None and prompt + wanted > made_for:
            self.tell(
                f"With --max-new-tokens {wanted} an answer may exceed the {made_for} positions that {self.named} was "
                "made for. The text beyond them may make no sense."
            )
        if limit is None or prompt + wanted <= limit:
            return wanted
        if why := self.lacks_room(prompt):
            raise ConfigError(f"{why[0].upper()}{why[1:]}. Shorten the prompt.")
        return limit - prompt

    def write(
        self, inputs: Any, sampling: Sampling, plain: bool, streamer: Any = None, enough: Event | None = None
    ) -> Any:
        """The token ids generated after `inputs`, which are on the model's device, (rows, length). Rows of different
        lengths are run one by one if the model reads padding, or if padding would leave too little room for answers.

        Args:
            plain: the question has no chat template, so the answer is not ended by an end-of-turn token.
            streamer: a streamer from transformers.
            enough: an event that ends the answer when set.
        """
        if len(inputs["input_ids"]) > 1 and self._apart(inputs, sampling):
            return self._one_by_one(inputs, sampling, plain)
        import torch
        from transformers import StoppingCriteriaList

        from shardproof.train.answers.ends import Ends, Stops

        def stopped(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(ids),), enough is not None and enough.is_set(), device=ids.device)

        prompt = inputs["input_ids"].shape[1]
        ending: list[Any] = [stopped]
        if sampling.stop_words:
            ending.append(Stops(Ends(sampling.stop_words, self.tokenizer), prompt))
        choice = sampling.arguments()
        if not self.remembers:
            choice["use_cache"] = False
        if ends := self._ends[plain]:
            choice["eos_token_id"] = ends
        room = self.room(prompt, sampling.max_new_tokens)
        with self._told_plainly():
            tokens = self.model.generate(
                **inputs,
                max_new_tokens=room,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList(ending),
                **choice,
            )
        if room < sampling.max_new_tokens and tokens.shape[1] == prompt + room:
            limit = prompt + room
            self.tell(f"An answer ends with the last of the {limit} positions that the model has learned.")
        self._look_at(tokens[:, prompt:].tolist())
        return tokens[:, prompt:]

    def _apart(self, inputs: Any, sampling: Sampling) -> bool:
        """Whether rows are padded in a way that would change their answers."""
        import torch

        from shardproof.train.model.left_padding import reads_padding

        if "attention_mask" not in inputs or inputs["attention_mask"].all():
            return False
        mask, limit = inputs["attention_mask"].bool(), learnt_positions(self._inner)
        if self._reads is None:
            row = mask.sum(1).argmin()
            with torch.no_grad():
                self._reads = reads_padding(self.model, inputs["input_ids"][row][mask[row]][None, :SOME])
        return self._reads or (limit is not None and mask.shape[1] + sampling.max_new_tokens > limit)

    def _one_by_one(self, inputs: Any, sampling: Sampling, plain: bool) -> Any:
        import torch

        found = []
        for number, mask in enumerate(inputs["attention_mask"].bool()):
            alone = {name: value[number : number + 1, mask] for name, value in inputs.items()}
            found.append(self.write(alone, sampling, plain)[0])
        pad = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=pad)

    @contextlib.contextmanager
    def _told_plainly(self) -> Iterator[None]:
        """For a model whose code is not from transformers, report what it lacks for generate()."""
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
                f"{kind.__name__} does not work with transformers' generate(): {first_line(error)} ({place.filename}, "
                f"line {place.lineno})."
            ) from error
