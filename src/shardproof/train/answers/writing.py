"""A model that writes: transformers' generate(), with where answers end, what room there is, and what is told of it."""

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

SOME = 16  # tokens, by which a model shows whether it reads padding


class Tells:
    """What is told of answers, and how tokens become texts.

    Args:
        tokenizer: the model's own.
        named: what messages call the model.
        tells: whether this process is the one that warns.

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
        """Once, by one process."""
        if self._tells and warning not in self._told:
            self._told.add(warning)
            log.warning(warning)

    def lacks_room(self, prompt: int) -> str | None:
        """Why there is no room for an answer behind a question of so many tokens, if there is none."""
        if self.limit is None or prompt < self.limit:
            return None
        return f"the question has {prompt} tokens, and {self._of_limit()}: there is no room for an answer"

    def _of_limit(self) -> str:
        raise NotImplementedError

    def texts(self, tokens: Any, sampling: Sampling) -> list[str]:
        """The answers that `write` gave."""
        decoded = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [sampling.ended(text).strip() for text in decoded]

    def _look_at(self, tokens: Sequence[Sequence[int]]) -> None:
        """Keep what was `written`, and tell of tokens, those of each row, that the tokenizer makes nothing of."""
        self.written = self.tokenizer.decode(tokens[0])
        beyond = [one for one in dict.fromkeys(chain(*tokens)) if one >= len(self.tokenizer)]
        if unknown := [str(one) for one in beyond if not self.tokenizer.decode([one])]:
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            self.written = self.written or f"tokens {shown}, which its tokenizer does not have"
            self.tell(
                f"{self.named[:1].upper()}{self.named[1:]} writes tokens that its tokenizer does not have, which are"
                " left out: the tokenizer is that of another model, or the model has learnt little."
            )


class Writer(Tells):
    """Writes behind the tokens of a question.

    Args:
        model: of transformers, sharded or not, with adapters or without.
        tokenizer, named, tells: as of `Tells`.

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
        # transformers' cache is one of layers, and asks the config how many there are.
        self.remembers = hasattr(self._inner.config.get_text_config(decoder=True), "num_hidden_layers")
        known = getattr(getattr(self._inner, "generation_config", None), "eos_token_id", None)
        self._ends = {plain: stops(tokenizer, known, turns=not plain) for plain in (True, False)}
        self.limit = learnt_positions(self._inner)
        self._reads: bool | None = None  # padding, where that is known

    def _of_limit(self) -> str:
        return f"{self.named} has learnt {self.limit} positions, and none beyond"

    def room(self, prompt: int, wanted: int) -> int:
        """How many tokens may be written behind a prompt of so many: a model that has learnt its positions has no more.

        Raises:
            ConfigError: none.
        """
        limit, made_for = self.limit, rotary_positions(self._inner.config)
        if made_for is not None and prompt + wanted > made_for:
            self.tell(
                f"With --max-new-tokens {wanted} an answer may go beyond the {made_for} positions that {self.named} is "
                "made for. What it writes there may make no sense."
            )
        if limit is None or prompt + wanted <= limit:
            return wanted
        if why := self.lacks_room(prompt):
            raise ConfigError(f"{why[0].upper()}{why[1:]}. Shorten the prompt.")
        return limit - prompt

    def write(
        self, inputs: Any, sampling: Sampling, plain: bool, streamer: Any = None, enough: Event | None = None
    ) -> Any:
        """What is written behind `inputs`, which lie on the model's device: token ids, (rows, length). Rows of
        different lengths are asked one by one where the model reads padding, or where that takes the room of answers.

        Args:
            plain: no chat template is around the question, so that no end of a turn ends the answer.
            streamer: of transformers.
            enough: ends the answer once it is set.
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
            self.tell(f"An answer ends with the last of the {limit} positions that the model has learnt.")
        self._look_at(tokens[:, prompt:].tolist())
        return tokens[:, prompt:]

    def _apart(self, inputs: Any, sampling: Sampling) -> bool:
        """Whether rows have padding before them with which their answers would be others."""
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
                f"{kind.__name__} does not work with transformers' generate(): {first_line(error)} ({place.filename}, "
                f"line {place.lineno})."
            ) from error
