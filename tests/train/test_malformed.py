"""Regular expressions and chat templates that are none are told with the options, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.cli.main import main
from shardproof.data.encoding.template_syntax import check_template
from shardproof.errors import ConfigError
from shardproof.models.chatml import CHATML
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf import recipe as rlhf
from shardproof.train.sft import recipe as sft

NAMED: Any = {"model": "nobody/nowhere", "dataset": ["stdlib"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"tuner": "lora", "target_modules": ["(q_proj"]},
            "--target-modules (q_proj is not a regular expression: missing ), unterminated subpattern at position 0.",
        ),
        (
            {"freeze_parameters": ["norm", "layers[0"]},
            "--freeze-parameters layers[0 is not a regular expression: unterminated character set at position 6.",
        ),
        (
            {"trainable_parameters": ["*head"]},
            "--trainable-parameters *head is not a regular expression: nothing to repeat at position 0.",
        ),
        (
            {"chat_template": "{% for m in messages %}\n{{ m.content }"},
            "--chat-template: line 2 of the template is not valid Jinja: unexpected '}'.\nThe line is: {{ m.content }",
        ),
    ],
)
def test_what_is_malformed_is_told_with_its_place(options: dict[str, Any], said: str) -> None:
    for recipe, config in ((sft, SftConfig(**NAMED, **options)), (rlhf, RlhfConfig(**NAMED, **options))):
        with pytest.raises(ConfigError) as caught:
            recipe.check(config, 1)
        assert str(caught.value) == said


def test_so_is_the_pattern_of_a_reward() -> None:
    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["format"], format_pattern="(?s).*####(", **NAMED)
    with pytest.raises(ConfigError, match=r"--format-pattern .* is not a regular expression: missing \)"):
        rlhf.check(config, 1)


def test_names_and_templates_that_are_right_pass(tmp_path: Path) -> None:
    sft.check(SftConfig(**NAMED, tuner="lora", target_modules=["q_proj", "v_proj"]), 1)
    marked = "{% for m in messages %}{%- generation\n -%}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    for template in ("chatml", CHATML, marked):
        check_template(template)
    file = tmp_path / "own.jinja"
    file.write_text(marked)
    check_template(str(file))
    file.write_text("{% for m in messages %}\n{{ m.content | nosuch }}\n{% endfor %}")
    with pytest.raises(
        ConfigError, match=r"--chat-template: .*own\.jinja:2 is not valid Jinja: No filter named 'nosuch'"
    ):
        check_template(str(file))


@pytest.mark.parametrize(
    "argv",
    [
        ["infer", "RUN", "--chat-template", "{{ messages"],
        ["data", "show", "--model", "nobody/nowhere", "--dataset", "stdlib", "--chat-template", "{{ messages"],
        ["plan", "--model", "RUN", "--tuner", "lora", "--target-modules", "(q"],
        ["doctor", "--model", "nobody/nowhere", "--dataset", "stdlib", "--freeze-parameters", "("],
    ],
)
def test_other_commands_say_so_too(argv: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = main([str(tmp_path) if word == "RUN" else word for word in argv])
    told = capsys.readouterr()
    assert code == (1 if argv[0] == "doctor" else 2)
    said = " ".join((told.out + told.err).split())
    assert "is not a regular expression" in said or "line 1 of the template is not valid Jinja" in said
