"""`shardproof infer` with a model that gives labels: for one text, those typed in, or the rows of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.cli import options
from shardproof.cli.infer_asked import InferConfig, asked, files_of, question_of
from shardproof.cli.infer_rows import follow
from shardproof.data.forms.parts import KINDS
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from shardproof.data.forms.labels import Labels
    from shardproof.train.options.config import SftConfig

WRITING = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "num_beams", "stop_words", "seed"),
    *("answer_metrics", "agent_template", "response_prefix"),
)
OF_PLUGINS = ("external_plugins", "model_type", "row_format")
MOST = 10  # probabilities shown at most


def give_labels(
    folder: Path, labels: Labels, config: InferConfig, system: str | None, stage: int | None, media: SftConfig
) -> int:
    """`media`: the options about files. Returns the exit code."""
    from shardproof.train.seq_cls.classifier import Classifier

    refuse_options(config, (*WRITING, *OF_PLUGINS), f"the model in {folder} gives labels")
    how = (config.trust_remote_code, config.chat_template, config.template_variables, config.plain)
    model = Classifier(folder, labels, system, *how, stage, media)
    if not model.takes_files:
        refuse_options(config, KINDS, f"the model in {folder} reads text", "files")
    if config.dataset:
        return _rows(model, config)
    if config.prompt is not None:
        _show(model, question_of(config.prompt, files_of(config)))
        return 0
    if model.first:
        print("Enter a text to get its label. An empty line or Ctrl-D quits.", flush=True)
    while text := model.shared(asked):
        _show(model, {"role": "user", "content": text})
    return 0


def refuse_options(config: InferConfig, names: Sequence[str], what: str, about: str = "generated answers") -> None:
    """Raise ConfigError if one of these options is given; `what`: what the model does instead."""
    for name in names:
        if getattr(config, name) != InferConfig.model_fields[name].default:
            raise ConfigError(f"{options.flag(name)} applies to {about}, and {what}. Leave it out.")


def _rows(model: Any, config: InferConfig) -> int:
    from shardproof.train.seq_cls.classifier import classify_rows

    file = Path(str(config.result_path)).expanduser()
    rounds, measured = classify_rows(model, config.dataset, config.columns, file, config.batch_size, config.bad_rows)
    follow(rounds, model.first, file)
    count, found = measured()
    if model.first and count:
        told = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"measured: {told} ({count:,} rows with a label)", flush=True)
    return 0


def _show(model: Any, turn: dict[str, Any]) -> None:
    """Print the label and its probabilities."""
    from shardproof.data.rows import Row

    (logits,) = model.logits([Row([turn], "", 0)])
    said = model.said(logits)
    if not model.first:
        return
    response = said["response"]
    print(", ".join(map(str, response)) or "(none)" if isinstance(response, list) else response)
    shares = sorted(said.get("probabilities", {}).items(), key=lambda pair: -pair[1])[:MOST]
    width = max((len(name) for name, _ in shares), default=0)
    for name, share in shares:
        print(f"  {name:{width}}  {share:.4f}")
