"""The labels of a run and of a model folder, and the model that predicts them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardproof.data.forms.formats import Form, Normal, opened
from shardproof.data.forms.labels import LABEL, REGRESSION, SINGLE, Labels, some_labels
from shardproof.errors import ConfigError, DataError
from shardproof.models.scorers import SCORER
from shardproof.train.folder import ADAPTER
from shardproof.train.model.loading import TINY, load_model
from shardproof.train.model.reward_models import judges
from shardproof.train.options.config import SftConfig

MANY = 100  # labels: more are suggested as a file rather than on a line
FILE = "labels.json"  # beside adapters, whose own files do not name labels
RELEVANCE = Labels(("relevance",), REGRESSION)  # the label of a reranker
HEADS = ("score", "classifier")  # modules that PEFT trains in full by itself


def labels_of(config: SftConfig) -> Labels:
    """The labels that the options name, or those of a --model that is already a classifier.

    Raises:
        ConfigError: their number is not known, or contradictory.
    """
    if config.task == "reranker":
        return RELEVANCE
    names = _names(config.label_names)
    known = None if config.begins_with == TINY else labels_in(Path(config.begins_with).expanduser())
    count = config.num_labels or len(names) or (len(known.names) if known else 0)
    if not count and config.problem_type == REGRESSION:
        count = 1
    if not count:
        raise ConfigError(
            "--task seq_cls needs the number of labels: add --num-labels N, or name them: --label-names ham spam."
            + _suggested(config)
        )
    if names and len(names) != count:
        raise ConfigError(f"--num-labels {count}, and --label-names has {len(names)}. Leave --num-labels out.")
    if known is not None and len(known.names) != count:
        raise ConfigError(
            f"{config.begins_with} already has {len(known.names)} labels ({', '.join(known.names[:5])}), not"
            f" {count}: leave --num-labels and --label-names out, or use the model that it was made from."
        )
    problem = config.problem_type
    if count == 1 and problem == SINGLE:
        raise ConfigError("--problem-type single_label_classification: one label leaves nothing to classify.")
    if known is not None:
        found = known if not names else dataclasses.replace(known, names=tuple(names))
        return dataclasses.replace(found, problem=problem or known.problem)
    found = Labels.numbered(count, problem)
    return dataclasses.replace(found, names=tuple(names)) if names else found


def _suggested(config: SftConfig) -> str:
    """The option that fits the rows, or an empty string."""
    from shardproof.data.rows import read_rows

    def with_label(record: Any, columns: Mapping[str, str] | None) -> Normal:
        label = opened(record, columns).get(LABEL)
        return [{"role": "user", "content": "x"}], {LABEL: label}, "text"

    if not all(Path(name.rpartition("#")[0] or name).is_file() for name in config.dataset):
        return ""
    try:
        rows = read_rows(config.dataset, columns=config.columns, form=Form(with_label, ""), bad_rows="skip")
    except DataError:
        return ""  # reported when they are read
    found = {row.extra[LABEL] for row in rows if isinstance(row.extra[LABEL], (str, int))}
    numbers = {int(label) for label in found if not isinstance(label, str) or label.isdecimal()}
    if found and len(numbers) == len(found):
        return f"\nThe labels in the rows go up to {max(numbers)}: --num-labels {max(numbers) + 1}"
    texts = sorted(label for label in found if isinstance(label, str))
    if len(texts) > MANY:
        return (
            f"\nThe rows have {len(texts):,} labels ({some_labels(texts)}): --label-names FILE.txt, with a name on"
            " each line"
        )
    return f"\nThe rows have {len(texts)} labels: --label-names {shlex.join(texts)}" if texts else ""


def _names(given: list[str]) -> list[str]:
    """The names themselves, or the lines of a file of names."""
    if len(given) == 1 and given[0].endswith(".txt"):
        try:
            lines = Path(given[0]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"--label-names {given[0]} cannot be read: {reason}.") from None
        given = [line.strip() for line in lines if line.strip()]
    if twice := next((name for name, count in Counter(given).items() if count > 1), None):
        raise ConfigError(f"--label-names: {twice!r} is listed twice.")
    return given


def resolved(config: SftConfig, labels: Labels) -> SftConfig:
    """The options with these labels made explicit, for config.yaml, wherever they came from."""
    names = list(labels.names) if labels.named else []
    return config.model_copy(
        update={"num_labels": len(labels.names), "label_names": names, "problem_type": labels.problem}
    )


def labels_in(folder: Path) -> Labels | None:
    """The labels of the model or adapters in a folder; None for any other model, and for reward models."""
    if not judges(folder):
        return None
    file = folder / FILE
    if not file.is_file():
        if (folder / ADAPTER).is_file():  # from rlhf, or from elsewhere
            return None
        file = folder / "config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    names = said.get("id2label")
    if not names:
        found = Labels.numbered(said.get("num_labels") or 2)  # transformers' default, which it does not write
    else:
        found = Labels(tuple(names[key] for key in sorted(names, key=int)), SINGLE)
    if len(found.names) == 1 and said.get("problem_type") is None:
        return None  # a reward model
    return dataclasses.replace(found, problem=said.get("problem_type") or found.problem)


def write_labels(folder: Path, labels: Labels) -> None:
    """Write the labels of adapters. A full model has them in its config."""
    if (folder / ADAPTER).is_file():
        (folder / FILE).write_text(json.dumps(labels.config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load_classifier(source: str, config: SftConfig, labels: Labels, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The model of `source` with a head for these labels, which is new if it has none, and the loading info.

    The arguments are those of `load_model`. The model does not know the padding token yet.
    """
    found: tuple[Any, dict[str, Any]]
    found = load_model(source, config, SCORER, output_loading_info=True, **labels.config, **more)
    return found


def new_modules(missing: Any) -> list[str]:
    """Modules that are missing in the files, except for those that PEFT trains anyway: adapters on randomly initialised
    modules would be on different values when they are loaded."""
    paths = {str(name).rpartition(".")[0] for name in missing}
    return sorted(path for path in paths if path.partition(".")[0] not in HEADS)
