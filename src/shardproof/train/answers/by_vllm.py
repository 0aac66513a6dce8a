"""The same answers by vLLM, which writes those to many rows at once: `infer --backend vllm`.

vLLM chooses its own kernels and the dtype that it computes in, so that of two tokens that are about as likely it may
take the other one. What is asked, where an answer ends and what becomes of its tokens is decided here, as for
transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardproof.data.encoding.template import stops
from shardproof.errors import ConfigError
from shardproof.train.answers.chat import Chat, Question
from shardproof.train.answers.sampling import Sampling
from shardproof.train.answers.writing import Tells
from shardproof.train.folder import ADAPTER
from shardproof.train.model.loading import first_line

AT_ONCE = 512  # rows that vLLM is given together, where nothing else is said
TOP_K = 50  # transformers' own, where neither the user nor the model says anything
ALL = 0  # its word for tokens that are drawn from all, as here


def check_vllm() -> None:
    """Raise ConfigError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--backend vllm: the package vllm is not installed here: pip install vllm.\nLeave --backend out to"
            " generate with transformers."
        )


class ByVllm(Chat):
    """A model of text that answers by vLLM.

    Args:
        folder, how: as `Chat` takes them in this order.
        processes: GPUs that hold the model between them.
        longest: tokens of a question and its answer together; None: as many as the model is made for.
        memory: the share of a GPU's memory that vLLM takes; None: its own default.
        agent, prefix: as of `set_template`.

    Raises:
        ConfigError: the folder has adapters or a model that takes files, or vLLM cannot load it.
    """

    def __init__(
        self,
        folder: Path,
        *how: Any,
        processes: int = 1,
        longest: int | None = None,
        memory: float | None = None,
        agent: str | None = None,
        prefix: str = "",
    ) -> None:
        options = {"max_model_len": longest, "gpu_memory_utilization": memory}
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._options |= {"tensor_parallel_size": processes}
        if (folder / ADAPTER).is_file():
            raise ConfigError(
                f"--backend vllm needs a full model, and {folder} has adapters.\nMerge them, and use the result: "
                f"shardproof export {folder.parent} FOLDER, then infer FOLDER --backend vllm."
            )
        super().__init__(folder, *how, agent=agent, prefix=prefix)

    def load(self) -> None:
        """Have vLLM load the model."""
        from vllm import LLM

        if self.processing is not self.tokenizer:
            raise ConfigError(
                f"--backend vllm takes text only, and the model in {self.folder} also takes files. Leave --backend out."
            )
        source, own = str(self.folder), {"generation_config": "vllm", "trust_remote_code": self._trusted}
        try:
            self._engine = LLM(source, tokenizer=source, **own, **self._options)
        except Exception as error:  # whatever vLLM raises, and its processes
            raise ConfigError(
                f"vLLM cannot load the model in {source}: {first_line(error)}\nLeave --backend vllm out to generate"
                f" with transformers."
            ) from error

    def _begin(self, named: str) -> Any:
        return WritesByVllm(self._engine, self.tokenizer, named, self.folder)

    def place_model(self) -> None:
        """vLLM has."""

    @property
    def _device(self) -> Any:
        return "cpu"

    def answers(self, questions: Sequence[Question], sampling: Sampling) -> list[str]:
        """Answers to some questions, all of them at once."""
        found: dict[int, str] = {}
        for group in self._alike(questions):
            alike = [questions[i] for i in group]
            inputs = self._inputs(alike)
            pairs = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
            tokens = self._writer.write([ids[real].tolist() for ids, real in pairs], sampling, alike[0].plain)
            found.update(zip(group, self._writer.texts(tokens, sampling), strict=True))
        return [self.prefix + found[i] for i in range(len(questions))]


class WritesByVllm(Tells):
    """Writes behind the tokens of questions.

    Args:
        engine: of vLLM.
        folder: of the model.
    """

    def __init__(self, engine: Any, tokenizer: Any, named: str, folder: Path) -> None:
        from transformers import GenerationConfig

        super().__init__(tokenizer, named, tells=True)
        self._engine = engine
        self._seed, self._asked = 0, 0  # how many were asked since it was set
        self.limit: int = engine.llm_engine.model_config.max_model_len
        known = (folder / "generation_config.json").is_file()
        self._said = GenerationConfig.from_pretrained(folder) if known else GenerationConfig()
        ends = self._said.eos_token_id
        self._ends = {plain: stops(tokenizer, ends, turns=not plain) for plain in (True, False)}

    def _of_limit(self) -> str:
        return f"vLLM has room for {self.limit} of {self.named}, with the answer"

    def room(self, prompt: int, wanted: int) -> int:
        """How many tokens may be written behind a prompt of so many.

        Raises:
            ConfigError: none.
        """
        if why := self.lacks_room(prompt):
            raise ConfigError(
                f"{why[0].upper()}{why[1:]}. Shorten the prompt, or raise --vllm-max-model-len if the model supports"
                f" it."
            )
        return min(wanted, self.limit - prompt)

    def write(self, prompts: Sequence[list[int]], sampling: Sampling, plain: bool) -> list[list[int]]:
        """The tokens that are written behind those of each question."""
        import torch

        if self._seed != torch.initial_seed():
            self._seed, self._asked = torch.initial_seed(), 0
        seed = self._seed + self._asked
        self._asked += len(prompts)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        how = [self._chosen(sampling, plain, len(ids), (seed + i) % 2**63) for i, ids in enumerate(prompts)]
        tokens = [list(made.outputs[0].token_ids) for made in self._engine.generate(asked, how, use_tqdm=False)]
        rooms = (each.max_tokens for each in how)
        if any(room < sampling.max_new_tokens and len(made) == room for made, room in zip(tokens, rooms, strict=True)):
            self.tell(f"An answer ends with the last of the {self.limit} tokens that vLLM has room for.")
        self._look_at(tokens)
        return tokens

    def _chosen(self, sampling: Sampling, plain: bool, prompt: int, seed: int) -> Any:
        """In vLLM's words. Each question draws with a seed of its own: the same one may be asked again."""
        from vllm import SamplingParams

        top_k = self._said.top_k if sampling.top_k is None else sampling.top_k
        penalty = sampling.repetition_penalty or self._said.repetition_penalty
        return SamplingParams(
            max_tokens=self.room(prompt, sampling.max_new_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=TOP_K if top_k is None else top_k or ALL,
            repetition_penalty=penalty or 1.0,
            stop=list(sampling.stop_words),
            stop_token_ids=self._ends[plain],
            seed=seed,
        )
