"""Tokenizers of Mistral's own form, `tekken.json`."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

AUDIO, BEGIN_AUDIO, COUNT = 24, 25, 35
_TOOLS = [f"[{end}{name}]" for name in ("AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")]
_FIRST = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *_TOOLS, "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"]
_FIRST += ["[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
_LATER = {AUDIO: "[AUDIO]", BEGIN_AUDIO: "[BEGIN_AUDIO]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[TRANSCRIBE]"}
MARKS = dict(enumerate(_FIRST)) | _LATER
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def write_tekken(folder: Path) -> None:
    """A vocabulary of single bytes behind COUNT marks, and sounds as they are for an extractor of 16 bands."""
    special = [{"rank": i, "token_str": MARKS.get(i, f"<SPECIAL_{i}>"), "is_control": True} for i in range(COUNT)]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 256 + COUNT, "default_num_special_tokens": COUNT}
    bands = {"num_mel_bins": 16, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0, "audio_encoding_config": bands}
    said = {"config": {**config, "version": "v11"}, "vocab": vocab, "special_tokens": special, "audio": audio}
    (folder / "tekken.json").write_text(json.dumps(said))


def tekken_tokenizer() -> Any:
    """Such a tokenizer, as transformers converts it."""
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tekken(Path(folder))
        return convert_tekken_tokenizer(str(Path(folder, "tekken.json")), TEMPLATE)
