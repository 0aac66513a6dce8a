"""What a sound becomes does not depend on the sounds beside it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shardproof.models.loading.processors import load_processor
from shardproof.models.media.sounds import hearing_each_alone

RATE = {"sampling_rate": 16000}
LENGTHS = [1600, 1601, 1639, 1640, 1641, 1759, 1760, 5000, 9000, 15999, 16000, 16001, 40000]
WHISPER = {**RATE, "padding": True, "truncation": False, "return_attention_mask": True}
EXTRACTORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "WhisperFeatureExtractor": ({"feature_size": 16, "chunk_length": 2}, WHISPER),
    "Qwen3ASRFeatureExtractor": ({}, WHISPER),
    "Gemma3nAudioFeatureExtractor": ({}, {}),
    "Gemma4AudioFeatureExtractor": ({}, {}),
    "ParakeetFeatureExtractor": ({}, RATE),
    "SeamlessM4TFeatureExtractor": ({}, RATE),
}


def sounds(*lengths: int) -> list[Any]:
    chance = np.random.default_rng(0)
    return [chance.normal(scale=0.1, size=length).astype(np.float32) for length in lengths]


def extractor(name: str, **options: Any) -> Any:
    made = getattr(transformers, name)(**options)
    return hearing_each_alone(SimpleNamespace(feature_extractor=made)).feature_extractor


def test_an_extractor_that_is_not_told_what_to_make() -> None:
    """Granite Speech's takes no `return_tensors`: each row with a sound was refused."""

    class Extractor:
        def __call__(self, audios: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
            long = max(len(one) for one in audios)
            mask = torch.tensor([[i < len(one) for i in range(long)] for one in audios])
            return {"input_features": mask.float(), "input_features_mask": mask}

    heard = hearing_each_alone(SimpleNamespace(audio_processor=Extractor())).audio_processor
    assert heard(sounds(3))["input_features"].shape == (1, 3)
    assert heard(sounds(3, 5), return_tensors="pt")["input_features"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]


@pytest.mark.parametrize("name", EXTRACTORS)
def test_a_sound_is_the_same_in_any_batch(name: str) -> None:
    made, options = EXTRACTORS[name]
    hears, plain = extractor(name, **made), getattr(transformers, name)(**made)
    for length in LENGTHS:
        short, long = sounds(length, 50001)
        batch = hears([long, short], return_tensors="pt", **options)
        alone = plain([short], return_tensors="pt", **options)
        assert batch.keys() == alone.keys()
        for key, value in alone.items():
            within = tuple(slice(n) for n in value[0].shape)
            assert batch[key].dtype == value.dtype
            assert batch[key][1][within].equal(value[0]), (key, length)
            assert batch[key][1].count_nonzero() == value[0].count_nonzero(), (key, length)  # the rest is padding


def test_without_a_mask_a_batch_is_that_of_the_extractor() -> None:
    """It alone knows what its padding is."""
    plain, hears = transformers.Phi4MultimodalFeatureExtractor(), extractor("Phi4MultimodalFeatureExtractor")
    two = sounds(5000, 9000)
    for key, value in plain(two, return_tensors="pt", **RATE).items():
        assert hears(two, return_tensors="pt", **RATE)[key].equal(value)


def test_one_sound_may_come_by_itself() -> None:
    plain, hears = transformers.WhisperFeatureExtractor(), extractor("WhisperFeatureExtractor")
    (one,) = sounds(9000)
    for form in (one, one.tolist(), [one]):
        expected = plain(form, return_tensors="np", **WHISPER)["input_features"]
        assert (hears(form, return_tensors="np", **WHISPER)["input_features"] == expected).all()


def test_it_goes_to_other_processes_and_is_saved_as_before(tiny_models, tmp_path) -> None:
    processor = load_processor(str(tiny_models("qwen3_omni_moe")))
    there = pickle.loads(pickle.dumps(processor.feature_extractor))
    assert type(there) is type(processor.feature_extractor)
    processor.save_pretrained(tmp_path)
    plain = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(plain) is transformers.WhisperFeatureExtractor
    assert plain.to_dict() == there.to_dict() == processor.feature_extractor.to_dict()
