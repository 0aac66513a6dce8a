"""Options: one model, from the command line, from a file, or from both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardproof.cli import data
from shardproof.cli.elsewhere import COMMANDS, HERE, INSTEAD, STAGES
from shardproof.cli.from_swift import options as swift_options
from shardproof.cli.main import COMMANDS as OURS
from shardproof.cli.sft import parse
from shardproof.cli.table import parser_of
from shardproof.errors import ConfigError
from shardproof.train.folder import RunFolder
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig


def config_of(*argv: str) -> SftConfig:
    return parse(argv)[0]


def test_several_files_follow_one_option() -> None:
    assert config_of("--dataset", "a.jsonl", "b.csv#10", "--stage", "2").dataset == ["a.jsonl", "b.csv#10"]


def test_hyphen_and_underscore_are_the_same_in_names_but_not_in_values() -> None:
    config = config_of("--max_length", "7", "--learning_rate=3e-4", "--model", "my_model")
    assert (config.max_length, config.learning_rate, config.model) == (7, 3e-4, "my_model")


def test_a_value_behind_an_equals_sign_may_begin_as_an_option_does() -> None:
    assert config_of("--system=-short", "--model", "m").system == "-short"
    with pytest.raises(ConfigError, match="--learning-rate -1e-4: should be greater than or equal to 0"):
        config_of("--learning-rate=-1e-4")
    with pytest.raises(ConfigError, match=r"--part-learning-rates .*-1e-4.*: should be greater than or equal to 0"):
        config_of("--part-learning-rates", "llm=-1e-4")


def test_the_command_line_wins_over_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("stage: 1\nmax-length: 9\nlearning_rate: 1e-3\ndataset: one.jsonl\nval_split: 0.5\n")
    config = config_of(str(file), "--stage", "2")
    assert (config.stage, config.max_length, config.learning_rate) == (2, 9, 1e-3)
    assert config.dataset == ["one.jsonl"]


def test_a_file_says_numbers_and_nothing_as_yaml_does(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1e-3\nepochs: 2\nmax_steps: none\neval_steps:\ndebug: yes\nsystem: 'no'\ndataset: [a, b]\n"
    )
    config = config_of(str(file))
    assert (config.learning_rate, config.epochs, config.max_steps, config.eval_steps) == (1e-3, 2.0, None, None)
    assert (config.debug, config.system, config.dataset) == (True, "no", ["a", "b"])


@pytest.mark.parametrize("nothing", ["null", "~", "", "  # as it is"])
def test_an_empty_value_in_a_file_is_an_option_that_is_not_given(tmp_path, nothing: str) -> None:
    names = ["max_length", "dataset", "columns", "tuner", "packing", "precision", "part-learning-rates", "nproc"]
    theirs = ["num_train_epochs", "deepspeed", "gradient_checkpointing_kwargs", "freeze_vit", "use_liger_kernel"]
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{name}: {nothing}\n" for name in [*names, *theirs]) + "seed: 7\n")
    config, given = parse([str(file), "--model", "tiny"])
    assert given == {"seed", "model"}
    assert config == config_of("--model", "tiny", "--seed", "7")
    assert config_of(str(file), "--max-length", "9").max_length == 9
    file.write_text("max_length:\nmax-length: 5\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: max-length is given for the second time"):
        config_of(str(file))
    file.write_text("max_lenght:\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1: there is no option 'max_lenght'. Did you mean max_length?"):
        config_of(str(file))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("logging_steps: yes", "logging_steps is yes: should be a whole number"),
        ("stage: '2'", "stage is '2': should be a whole number"),
        ("stage: 2.0", "stage is 2.0: should be a whole number"),
        ("stage: 4", "stage is 4: should be less than or equal to 3"),
        ("max-length: long", "max-length is long: should be a whole number"),
        ("learning_rate: fast", "learning_rate is fast: should be a number"),
        ("learning_rate: true", "learning_rate is true: should be a number"),
        ("epochs: .inf", "epochs is .inf: must be a finite number"),
        ("lorap-lr-ratio: .inf", "lorap-lr-ratio is .inf: must be a finite number"),
        ("lora-alpha: .inf", "lora-alpha is .inf: must be a finite number"),
        ("model:", "model is empty: should be text"),
        ("model: 7", "model is 7: should be text"),
        ("system: 2026-11-21", "system is 2026-11-21: should be text"),
        ("debug: 'yes'", "debug is 'yes': should be yes or no"),
        ("dataset: [a, 5]", "dataset is [a, 5]: should be text, or a list of texts"),
        ("dataset:\n- a\n- 5", "dataset is - a ...: should be text, or a list of texts"),
        ("columns: {query: 5}", "columns is {query: 5}: should be pairs"),
        ("tuner: qlora", "tuner is qlora: should be 'full' or 'lora'"),
        ("max-length: 5\nmax_length: 6", "max_length is given for the second time"),
        ("lora_rnak: 5", "there is no option 'lora_rnak'. Did you mean lora_rank?"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_by_file_line_and_key(tmp_path, text: str, problem: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"# a comment\nseed: 1\n{text}\n")
    line = 4 if "second time" in problem else 3
    with pytest.raises(ConfigError) as error:
        parse([str(file)])
    assert str(error.value).startswith(f"{file}:{line}: {problem}")


@pytest.mark.parametrize(
    "argv",
    [["query=question,response=answer"], ["query=question", "response=answer"], ["query=question, response=answer"]],
)
def test_columns_are_pairs(argv: list[str]) -> None:
    assert config_of("--columns", *argv).columns == {"query": "question", "response": "answer"}


@pytest.mark.parametrize("text", ["{query: question}", "query=question", "[query=question]", "\n  query: question"])
def test_columns_in_a_file_are_a_mapping_or_pairs(tmp_path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"columns: {text}\n")
    assert config_of(str(file)).columns == {"query": "question"}


def test_what_a_run_writes_down_is_read_as_it_was(tmp_path) -> None:
    config = SftConfig(system="no", model="123", learning_rate=1e-5, columns={"query": "1"}, chat_template="{{ x }}\n")
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    assert config_of(str(folder.config)) == config


def test_a_switch_may_stand_alone_or_with_a_value() -> None:
    assert config_of("--gradient-checkpointing").gradient_checkpointing
    assert not config_of("--gradient-checkpointing", "no").gradient_checkpointing
    assert config_of("--gradient-checkpointing", "selective").gradient_checkpointing == "selective"
    assert config_of("--gradient-checkpointing", "2").gradient_checkpointing == 2
    with pytest.raises(ConfigError, match="one of yes, no, selective, N"):
        config_of("--gradient-checkpointing", "some")


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--max-lenth", "3"], "Did you mean --max-length?"),
        (["--lr", "1e-4"], "There is no option --lr. Here it is --learning-rate."),
        (["--num_epochs", "3"], "Here it is --epochs."),
        (["--load-in-4bit"], "Here it is --quantize nf4."),
        (["--per_device_train_batch_sise", "3"], "Did you mean --per-device-train-batch-size?"),
        (["--stage", "4"], "--stage 4"),
        (["--learning-rate", "fast"], "--learning-rate fast"),
        (["--tuner", "qlora"], "'full' or 'lora'"),
        (["--columns", "query"], "should be pairs"),
        (["--columns", "query=a,query=b"], "query is given as a and as b: leave one of them out."),
        (["--lr-scheduler-kwargs", "min_lr=x"], "should be pairs of a name and a number"),
        (["--stage"], "expected one argument"),
        (["a.yaml", "b.yaml"], "b.yaml"),
        (["--dataset", "run.yaml"], "comes first"),
    ],
)
def test_what_cannot_be_is_named(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        parse(argv)


def test_a_file_with_an_unknown_option_is_refused_with_the_nearest(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learnin_rate: 1\n")
    with pytest.raises(ConfigError, match="Did you mean learning_rate"):
        parse([str(file)])


def test_a_file_may_have_the_name_of_another_trainer(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    for text, said in (("lr: 1", "Here it is learning_rate."), ("use_peft: true", "Here it is tuner: lora.")):
        file.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=f"there is no option '.*'. {said}"):
            parse([str(file)])


def test_names_of_other_trainers_are_not_taken_here_and_lead_to_what_is() -> None:
    taken = {*SftConfig.model_fields, *RlhfConfig.model_fields}
    theirs = {*swift_options.RENAMED, *swift_options.SPECIAL, *swift_options.WITHOUT_EFFECT, *swift_options.MISSING}
    for name, (option, value) in HERE.items():
        assert name not in taken | theirs
        fields = RlhfConfig.model_fields if name == "pref_beta" else SftConfig.model_fields
        assert config_of(f"--{option}", value) if value else option in fields
    for name, said in INSTEAD.items():
        assert name not in taken | theirs | {*HERE}
        with pytest.raises(ConfigError, match=f"There is no option --{name.replace('_', '-')}. {re.escape(said)}"):
            parse([f"--{name}", "true"])


def test_a_stage_of_another_trainer_is_what_is_trained_for() -> None:
    for stage, said in STAGES.items():
        with pytest.raises(
            ConfigError, match=f"--stage {stage}: that is {re.escape(said)}; here a stage says how much is shard"
        ):
            parse(["--stage", stage])


def test_what_other_commands_are_here_can_be_typed() -> None:
    """Of commands of others, each that is ours exists, with the options that are named."""
    for name, instead in [*COMMANDS.items(), *STAGES.items(), *INSTEAD.items()]:
        assert name not in OURS or name in STAGES
        for text in re.findall(r"'shardproof ([^']*)'", instead):
            command, *words = text.split()
            assert command in OURS
            given = [word for word in words if word.startswith("--")]
            assert all(word in parser_of(command)._option_string_actions for word in given), text


@pytest.mark.parametrize("name", ["num_ppo_epoch", "top_entropy_quantil", "quant_metho", "reward_fun", "rlhf_typ"])
def test_no_option_is_suggested_that_the_command_refuses(name: str) -> None:
    """Each is nearest to one of rlhf, or of ms-swift's that is not here."""
    with pytest.raises(ConfigError) as error:
        parse([f"--{name}", "3"])
    assert "There is no option" in str(error.value)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n"])
def test_a_file_that_holds_no_options_is_refused(tmp_path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        parse([str(file)])


@pytest.mark.parametrize(
    "given, world_size, expected",
    [
        ({}, 2, (2, 1)),
        ({"global_batch_size": 8}, 1, (2, 4)),
        ({"global_batch_size": 8}, 4, (2, 1)),
        ({"global_batch_size": 4}, 4, (1, 1)),
        ({"global_batch_size": 12, "per_device_batch_size": 3}, 2, (3, 2)),
        ({"global_batch_size": 12, "gradient_accumulation_steps": 2}, 2, (3, 2)),
        ({"per_device_batch_size": 5, "gradient_accumulation_steps": 3}, 2, (5, 3)),
    ],
)
def test_micro_batch_accumulation_and_processes_make_the_global_batch(given, world_size, expected) -> None:
    batch = SftConfig(**given).batch(world_size)
    assert (batch.micro, batch.accumulation) == expected
    assert batch.whole == given.get("global_batch_size", batch.whole)


@pytest.mark.parametrize(
    "given",
    [
        {"global_batch_size": 8, "per_device_batch_size": 3},
        {"global_batch_size": 3},
        {"global_batch_size": 8, "per_device_batch_size": 2, "gradient_accumulation_steps": 5},
    ],
)
def test_a_batch_that_does_not_come_out_even_is_refused(given) -> None:
    with pytest.raises(ConfigError, match="global-batch-size"):
        SftConfig(**given).batch(2)


def test_pairs_in_a_file_may_be_true_or_false(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("template_variables: {enable_thinking: false, mood: short}\n")
    assert parse([str(file)])[0].template_variables == {"enable_thinking": "false", "mood": "short"}


def test_an_error_of_a_worker_is_told_as_it_is():
    from shardproof.cli.main import message_of
    from shardproof.errors import DataError

    torchs = "Caught DataError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    assert message_of(DataError(torchs + "shardproof.errors.DataError: a.jsonl:7: gone")) == "error: a.jsonl:7: gone"


def test_numbers_in_lists_come_from_files_too(tmp_path: Path) -> None:
    """As a run writes them to its own config.yaml."""
    file = tmp_path / "run.yaml"
    file.write_text("interleave_prob: [0.5, 0.5]\n")
    assert parse([str(file)])[0].interleave_prob == [0.5, 0.5]
    file.write_text("interleave_prob: half\n")
    with pytest.raises(ConfigError, match="interleave_prob is half: should be numbers"):
        parse([str(file)])


def test_the_rows_that_are_shown_have_the_system_message_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Be brief.")
    argv = ["--model", "tiny", "--dataset", "stdlib", "--system"]
    assert data.parse([*argv, str(file)])[0].system == parse([*argv, str(file)])[0].system == "Be brief."
    with pytest.raises(ConfigError, match=r"--system missing.txt ends in .txt, but cannot be read as a file"):
        data.parse([*argv, "missing.txt"])


def test_help_wraps_the_values_of_an_option_that_has_many(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parser_of("sft").parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (at,) = (number for number, line in enumerate(lines) if line.strip().startswith("--tuner "))
    assert lines[at].split()[1] == "KIND"
    assert "full, lora, adalora" in " ".join(" ".join(lines[at : at + 8]).split())
