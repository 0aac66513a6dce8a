"""Which digit is this? Scans of digits, recordings of spoken digits and questions in words, in one shuffled file.

    python digits.py data OUT --sounds FSDD     training and test rows (without --sounds: no recordings)
    python digits.py model OUT --kind omni      OUT/model: a small Qwen2.5-Omni, or with `minicpm` a small MiniCPM-V
    python digits.py score RUN OUT/test.jsonl   how many held-out questions a run's model answers correctly

The scans come with scikit-learn. FSDD is the folder of recordings of the Free Spoken Digit Dataset
(github.com/Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0): 8 kHz, named digit_speaker_number.wav.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections import Counter
from pathlib import Path

WORDS = "zero one two three four five six seven eight nine".split()
QUESTION = {"image": "<image>which digit is this?", "audio": "<audio>which digit is this?"}
FIELD = {"image": "images", "audio": "audios"}
HELD_OUT = 5  # the last recording of each digit by each speaker, and every sixth scan


def write_data(out: Path, sounds: Path | None, scans: int) -> None:
    """Write train.jsonl and test.jsonl, and next to them the files that their rows name."""
    rows = _scans(out / "scans", scans) + (_recordings(out / "sounds", sounds) if sounds else [])
    train = [row for row, held_out in rows if not held_out] + _words()
    test = [row for row, held_out in rows if held_out]
    chance = random.Random(0)
    chance.shuffle(train)
    for name, part in (("train", train), ("test", test)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"{out / 'train.jsonl'}: {len(train)} rows, {out / 'test.jsonl'}: {len(test)} rows")


def _row(kind: str, file: str, digit: int) -> dict[str, object]:
    return {"query": QUESTION[kind], "response": WORDS[digit], FIELD[kind]: [file]}


def _scans(folder: Path, most: int) -> list[tuple[dict[str, object], bool]]:
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    rows = []
    for i, (pixels, digit) in enumerate(zip(digits.images[:most], digits.target[:most], strict=True)):
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).resize((32, 32)).save(folder / f"{i}.png")
        rows.append((_row("image", f"{folder.name}/{i}.png", int(digit)), i % (HELD_OUT + 1) == HELD_OUT))
    return rows


def _recordings(folder: Path, sounds: Path) -> list[tuple[dict[str, object], bool]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for file in sorted(sounds.glob("*.wav")):
        digit, _, number = file.stem.split("_")
        shutil.copy(file, folder / file.name)  # a run reads nothing outside the folder of its rows
        rows.append((_row("audio", f"{folder.name}/{file.name}", int(digit)), int(number) == HELD_OUT))
    if not rows:
        raise SystemExit(f"There is no .wav in {sounds}.")
    return rows


def _words() -> list[dict[str, object]]:
    """Questions in words: rows without a file."""
    rows = []
    for digit, word in enumerate(WORDS):
        rows += [{"query": f"which digit is {digit}?", "response": word}] * 2
        rows.append({"query": f"which digit comes after {WORDS[digit - 1]}?", "response": word})
    return rows


def write_model(out: Path, kind: str) -> None:
    from shardproof.models.tiny_media import build_tiny_minicpm_v, build_tiny_omni

    texts = [
        f"which digit is this? {word} which digit comes after {word}? which digit is {i}?"
        for i, word in enumerate(WORDS)
    ]
    build = {"omni": build_tiny_omni, "minicpm": build_tiny_minicpm_v}[kind]
    print(f"model: {build(out / 'model', texts * 20)}")


def score(run: Path, test: Path) -> dict[str, tuple[int, int]]:
    """For each kind of file: the number of correct answers, and of all."""
    from shardproof.data.rows import read_rows
    from shardproof.train.answers.chat import Chat, Sampling
    from shardproof.train.answers.loaded import model_folder

    chat = Chat(model_folder(str(run)))
    asked, right = Counter(), Counter()
    for row in read_rows([test]):
        question, answer = row.messages
        (part,) = (part for part in question["content"] if part["type"] != "text")
        kind = part["type"]
        if FIELD[kind] == "audios" and getattr(chat.processing, "audio_token", None) is None:
            continue  # a model that cannot hear
        part[kind] = str((test.parent / part[kind]).absolute())
        asked[kind] += 1
        right[kind] += chat.answer([question], Sampling(max_new_tokens=4)) == answer["content"]
    for kind in asked:
        print(f"{kind}: {right[kind]} of {asked[kind]} right ({right[kind] / asked[kind]:.0%})")
    return {kind: (right[kind], asked[kind]) for kind in asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("out", type=Path)
    data.add_argument("--sounds", type=Path)
    data.add_argument("--scans", type=int, default=1797)
    model = commands.add_parser("model")
    model.add_argument("out", type=Path)
    model.add_argument("--kind", choices=("omni", "minicpm"), default="omni")
    scored = commands.add_parser("score")
    scored.add_argument("run", type=Path)
    scored.add_argument("test", type=Path)
    given = parser.parse_args()
    if given.command == "data":
        write_data(given.out, given.sounds, given.scans)
    elif given.command == "model":
        write_model(given.out, given.kind)
    else:
        score(given.run, given.test)


if __name__ == "__main__":
    main()
