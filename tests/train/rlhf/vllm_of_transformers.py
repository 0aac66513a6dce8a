"""A vLLM in the process, made of transformers: there is no GPU here, and without one no vLLM.

TRL's code for a vLLM in the processes that train runs as it is. In place of `vllm.LLM` stands a model that is read from
the folder that TRL names, takes weights by `load_weights`, forgets them when it sleeps, and writes what it draws.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from train.rlhf.algorithms import Series, series_of


class LLM:
    """What of `vllm.LLM` TRL calls. What is drawn depends on the prompt and on how often it is in the call."""

    made: ClassVar[list[LLM]] = []

    def __init__(self, model: str, max_model_len: int, enable_sleep_mode: bool, **more: Any) -> None:
        from transformers import AutoTokenizer
        from transformers.core_model_loading import revert_weight_conversion

        from shardproof.models.loading.classes import load_pretrained

        self.net: Any = load_pretrained(model).eval().requires_grad_(False)
        # By the names that files have, as the real one reads them.
        self.places = revert_weight_conversion(self.net, dict(self.net.named_parameters()))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.pictures: list[int] = []  # that came with each prompt; what is drawn is blind to them
        self.held: set[int] = set()  # tokens that no answer may hold
        self.can_sleep, self.asleep, self.loads, self.given = enable_sleep_mode, set[str](), 0, more
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            model_executor=executor, model_config=SimpleNamespace(max_model_len=max_model_len)
        )
        LLM.made.append(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self.asleep
        for name, value in weights:
            self.places[name].copy_(value)
            self.loads += 1

    def sleep(self, level: int) -> None:
        assert self.can_sleep
        assert level == 2
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.net.parameters():
            parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        assert self.can_sleep
        self.asleep -= set(tags)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        for prompt in prompts:
            seen = prompt.get("multi_modal_data", {}).get("image", [])
            self.pictures.append(len(seen) if isinstance(seen, list) else 1)
        self.held |= {token for token, bias in getattr(sampling_params, "logit_bias", {}).items() if bias == -100.0}
        given = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        return [self._answered(ids, given[:i].count(ids), sampling_params) for i, ids in enumerate(given)]

    def _stopped(self, drawn: list[int], how: Any) -> bool:
        return any(word in self.tokenizer.decode(drawn) for word in getattr(how, "stop", ()))

    def _answered(self, prompt: tuple[int, ...], number: int, how: Any) -> Any:
        chance = torch.Generator().manual_seed(hash((prompt, number)) % 2**31)
        ends = self.net.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        ids, drawn, logprobs = list(prompt), [], []
        while len(drawn) < how.max_tokens and not (drawn and drawn[-1] in ends) and not self._stopped(drawn, how):
            logits = self.net(torch.tensor([ids])).logits[0, -1].float() / how.temperature
            for token, bias in getattr(how, "logit_bias", {}).items():
                logits[token] += bias
            chances = logits.log_softmax(-1)
            drop = (torch.rand(1, generator=chance) + number / 2) % 1  # answers to a prompt are far apart
            token = min(int(torch.searchsorted(chances.exp().cumsum(0), drop)), len(chances) - 1)
            ids.append(token)
            drawn.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(chances[token]), rank=1)})
        return SimpleNamespace(
            prompt_token_ids=list(prompt), outputs=[SimpleNamespace(token_ids=drawn, logprobs=logprobs)]
        )


def found() -> Any:
    """Inside, the package vllm is found where options are checked."""
    find = importlib.util.find_spec

    def spec(name: str, package: str | None = None) -> Any:
        return importlib.machinery.ModuleSpec(name, None) if name == "vllm" else find(name, package)

    return mock.patch.object(importlib.util, "find_spec", spec)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, TRL finds a vLLM, which is this one."""
    from trl.generation import vllm_generation

    parameters = mock.patch.object(vllm_generation, "SamplingParams", SimpleNamespace, create=True)
    there = mock.patch.object(vllm_generation, "is_vllm_available", return_value=True)
    # Another test of this rank may have brought it since TRL was imported, which has no name for it then.
    packed = mock.patch.object(vllm_generation, "is_bitsandbytes_available", return_value=False)
    with mock.patch.object(vllm_generation, "LLM", LLM, create=True), parameters, there, packed:
        yield


def series_with_vllm(prepared: list[Any]) -> list[Series]:
    """`series_of`, in which each process has such a vLLM."""
    LLM.made.clear()
    with installed():
        return series_of(prepared)


def given_to_vllm(prepared: list[Any]) -> tuple[list[Series], list[int], list[Any]]:
    """The same; also how many weights each vLLM of this rank was given, and with what it was made."""
    series = series_with_vllm(prepared)
    return series, [llm.loads for llm in LLM.made], [llm.given for llm in LLM.made]


def pictures_given(prepared: list[Any]) -> tuple[list[int], set[int]]:
    """Train on this rank; how many pictures its vLLM was given with each prompt, and which tokens it may not draw."""
    series_with_vllm(prepared)
    return [count for llm in LLM.made for count in llm.pictures], set().union(*(llm.held for llm in LLM.made))
