"""What a run leaves behind, and what can be done with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from report.browser import needs_chromium, shown

OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def runs(commands, sft, tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """A full run at stage 3, a LoRA run, one in bf16, a repetition of the first, and questions to them."""
    bad = tmp_path_factory.mktemp("bad") / "bad.jsonl"
    bad.write_text(rows.read_text() + '{"prompt": "alone"}\n')
    plain = tmp_path_factory.mktemp("models") / "plain"
    shutil.copytree(tiny, plain)
    (plain / "chat_template.jinja").unlink()
    table = plain.parent / "table.csv"
    table.write_text("question,answer,other\n" + "".join(f"what is {i}?,it is {i},x\n" for i in range(20)))
    template = plain.parent / "own.jinja"
    template.write_text(OWN)
    ask = ["--prompt", "what holds a gradient", "--max-new-tokens", "5"]
    made = ["--model", "tiny", "--dataset"]
    return commands(
        [
            ("full", sft("--nproc", "2", "--stage", "3", "--val-split", "0.2", "--system", "be short")),
            ("lora", sft("--nproc", "2", "--stage", "3", "--tuner", "lora", "--target-modules", "q_proj", "v_proj")),
            ("bf16", sft("--nproc", "1", "--stage", "2", "--precision", "bf16", "--report-to", "tensorboard")),
            ("skip", ["sft", *made, str(bad), "--bad-rows", "skip", "--max-steps", "1", "--output-dir", "OUT"]),
            ("one", sft("--max-steps", "1")),
            ("warm", sft("--max-steps", "1", "--lr-scheduler", "cosine")),
            ("demo", ["demo", "--dataset", "stdlib#200", "--max-steps", "3", "--output-dir", "OUT"]),
            ("again", ["sft", "RUNS/full/config.yaml", "--output-dir", "OUT"]),
            ("taken", ["sft", "RUNS/full/config.yaml", "--output-dir", "RUNS/full"]),
            ("ask_full", ["infer", "RUNS/full", *ask]),
            ("ask_lora", ["infer", "RUNS/lora", *ask, "--stream", "no"]),
            ("ask_file", ["infer", "RUNS/full", "--prompt", "what is it", "--image", str(table)]),
            ("ask_system", ["infer", "RUNS/full", *ask, "--system", "missing.txt"]),
            ("ask_two", ["infer", "RUNS/lora", *ask, "--nproc", "2"]),
            (
                "templated",
                [
                    *(
                        "sft",
                        "--model",
                        str(plain),
                        "--dataset",
                        str(table),
                        "--columns",
                        "query=question,response=answer",
                    ),
                    *("--chat-template", str(template), "--max-steps", "2", "--output-dir", "OUT"),
                ],
            ),
            ("templated_again", ["sft", "RUNS/templated/config.yaml", "--output-dir", "OUT"]),
            ("ask_templated", ["infer", "RUNS/templated", *ask]),
            ("ask_none", ["infer", str(plain), *ask]),
            ("ask_chatml", ["infer", str(plain), *ask, "--chat-template", "chatml"]),
            ("ask_plain", ["infer", str(plain), *ask, "--plain"]),
            ("epochs", ["sft", "RUNS/one/config.yaml", "--output-dir", "OUT", "--max-steps", "none"]),
        ]
    )


def test_a_run_says_little_and_where_its_result_is(runs) -> None:
    run = runs["full"]
    assert run.code == 0, run.output
    lines = run.output.strip().splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step 1/"))
    assert first_step <= 15
    assert lines[-1] == f"talk to it: shardproof infer {run.folder}"
    assert lines[-2] == f"weights: {run.folder / 'model'}"


def test_the_folder_holds_config_metrics_and_a_model_transformers_loads(runs, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs["full"].folder
    expected = {"step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "memory"}
    assert expected <= runs["full"].records[0].keys()
    assert len(runs["full"].series("eval_loss")) == 1
    model, report = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    start = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.config.use_cache == start.config.use_cache
    for (name, was), now in zip(start.named_parameters(), model.parameters(), strict=True):
        assert now.dtype == torch.float32
        assert not torch.equal(was, now), f"{name} was not trained"


def test_each_rank_says_what_it_held_moved_and_waited_for(runs) -> None:
    """And the timeline of the last step has moved what its record says."""
    folder, record = runs["full"].folder, [r for r in runs["full"].records if "loss" in r][-1]
    ranks = record["ranks"]
    assert all(len(values) == 2 for values in ranks.values())
    assert max(ranks["memory"]) == record["memory"]
    assert all(0 < held <= peak for held, peak in zip(ranks["held"], ranks["memory"], strict=True))
    assert sum(r * s for r, s in zip(ranks["tokens_per_second"], ranks["seconds"], strict=True)) == pytest.approx(
        record["tokens"], rel=1e-3
    )
    for rank in (0, 1):
        assert 0 < ranks["waited"][rank] + ranks["met"][rank] <= ranks["seconds"][rank]
        timeline = json.loads((folder / f"timeline.rank{rank}.json").read_text())
        assert (timeline["rank"], timeline["step"], timeline["cut"]) == (rank, record["step"], False)
        for kind, name in (("gather", "gathered"), ("reduce", "reduced")):
            assert sum(size for what, _, size, *_ in timeline["moved"] if what == kind) == ranks[name][rank] > 0
        kinds = [kind for kind, *_ in timeline["computed"]]
        assert set(kinds) == {"forward", "backward", "update"}
        assert kinds.index("backward") > kinds.index("forward")
        times = [t for _, _, begin, end in timeline["computed"] for t in (begin, end)]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] <= timeline["seconds"]
        assert all(wanted <= begin <= taken for *_, wanted, begin, taken in timeline["moved"])


@needs_chromium
def test_the_page_of_a_run_shows_its_figures(runs) -> None:
    from shardproof.cli.main import main

    run = runs["full"]
    assert main(["report", str(run.folder)]) == 0
    page = shown((run.folder / "report.html").as_uri())
    lines = {(line["data-of"], line["data-line"]): float(line["data-last"]) for line in page.having("data-line")}
    assert lines["loss", "training"] == pytest.approx(run.series("loss")[-1], rel=1e-5)
    assert lines["gradient norm", ""] == pytest.approx(run.series("grad_norm")[-1], rel=1e-5)
    assert lines["memory", "rank 1"] == pytest.approx(run.records[-2]["ranks"]["held"][1], rel=1e-5)
    assert "timeline" in [each["data-figure"] for each in page.having("data-figure")]
    (run.folder / "report.html").unlink()


def test_the_saved_weights_have_the_loss_that_the_run_reported(runs, tiny: Path, rows: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardproof.data.encoding.encode import collate, encode_rows
    from shardproof.data.rows import read_rows

    folder = runs["full"].folder / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    held_out = read_rows([rows]).split(0.2, 42)[1]
    encoded = encode_rows(held_out, tokenizer, max_length=1024, system="be short")
    with torch.no_grad():
        loss = model(**collate(list(encoded), tokenizer.pad_token_id)).loss
    assert runs["full"].series("eval_loss")[-1] == pytest.approx(loss.item(), abs=1e-5)


def test_a_run_whose_only_step_warms_up_says_that_nothing_is_learnt(runs, tiny: Path) -> None:
    """So does transformers: few rows in one large batch left the weights as they were, and nobody was told."""
    before = load_file(tiny / "model.safetensors")
    for name, warms in (("warm", True), ("one", False)):
        assert ("rate     0 in the only step" in runs[name].output) == warms, runs[name].output
        after = load_file(runs[name].folder / "model" / "model.safetensors")
        assert all(torch.equal(before[key], value) for key, value in after.items()) == warms


def test_the_config_repeats_the_run(runs) -> None:
    assert runs["again"].code == 0, runs["again"].output
    assert runs["again"].series("loss") == pytest.approx(runs["full"].series("loss"), abs=1e-6)


def test_a_finished_run_is_not_written_over(runs) -> None:
    assert runs["taken"].code == 2
    assert "holds a run already" in runs["taken"].output


def test_adapters_are_saved_alone_and_load_on_their_base(runs, tiny: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = runs["lora"]
    assert run.code == 0, run.output
    weights = load_file(run.folder / "model" / "adapter_model.safetensors")
    assert len(weights) == 4 * 2 * 2  # layers, modules, A and B
    assert any(w.abs().sum() > 0 for name, w in weights.items() if "lora_B" in name)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), run.folder / "model")


def test_the_model_folder_holds_what_from_pretrained_needs_and_nothing_else(runs) -> None:
    names = {file.name for file in (runs["full"].folder / "model").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    names = {file.name for file in (runs["lora"].folder / "model").iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not names & {"training_args.bin", "model.safetensors"}


def test_a_template_of_ones_own_goes_with_the_run(runs) -> None:
    from transformers import AutoTokenizer

    run, again = runs["templated"], runs["templated_again"]
    assert run.code == 0, run.output
    assert AutoTokenizer.from_pretrained(run.folder / "model").chat_template == OWN
    assert again.code == 0, again.output
    assert again.series("loss") == pytest.approx(run.series("loss"), abs=1e-6)
    assert runs["ask_templated"].code == 0, runs["ask_templated"].output


def test_without_a_template_asking_names_the_ways_out(runs) -> None:
    assert runs["ask_none"].code == 2
    assert "--chat-template" in runs["ask_none"].output
    assert "--plain" in runs["ask_none"].output
    assert len(runs["ask_none"].output.splitlines()) <= 3
    for name in ("ask_chatml", "ask_plain"):
        assert runs[name].code == 0, runs[name].output


def test_several_processes_that_hold_the_model_between_them_answer_as_one(runs) -> None:
    """The base and its adapters are cut, and the first process speaks."""
    assert runs["ask_two"].code == 0, runs["ask_two"].output
    assert runs["ask_two"].output == runs["ask_lora"].output


@pytest.fixture(scope="module")
def talkative(commands, sft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt one conversation by heart, so that its second answer is another one than the first."""
    said = ["what holds a gradient", "a shard holds one", "and a weight", "every rank sends one"]
    roles = ("user", "assistant") * 2
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    file = tmp_path_factory.mktemp("conversation") / "one.jsonl"
    file.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    run = commands([("talkative", sft("--dataset", str(file), "--max-steps", "40"))])["talkative"]
    assert run.series("loss")[-1] < 0.1, run.output
    return run.folder


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_conversation(talkative: Path, nproc: str) -> None:
    """What is typed goes to all processes; a question after /new is answered as the first time."""
    command = [sys.executable, "-m", "shardproof", "infer", str(talkative), "--nproc", nproc]
    typed = "what holds a gradient\nand a weight\n/new\nwhat holds a gradient\n\n"
    more = ["--max-new-tokens", "5"]
    done = subprocess.run([*command, *more], input=typed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, second, _, again, nothing = done.stdout.split("you> ")[1:]
    assert first == again
    assert first != second
    assert not nothing.strip()


def test_a_question_that_cannot_be_asked_is_refused(runs) -> None:
    assert runs["ask_file"].code == runs["ask_system"].code == 2
    assert "The prompt has a file of type image, but this model takes text only." in runs["ask_file"].output
    assert "--system missing.txt ends in .txt, but cannot be read as a file" in runs["ask_system"].output


@pytest.mark.parametrize("name", ["ask_full", "ask_lora"])
def test_a_run_can_be_asked(runs, name: str) -> None:
    assert runs[name].code == 0, runs[name].output
    assert len(runs[name].output.strip().splitlines()) <= 5


def test_skipped_rows_are_counted_and_listed(runs) -> None:
    assert runs["skip"].code == 0, runs["skip"].output
    assert "1 bad row(s)" in runs["skip"].output
    assert "bad.jsonl:24: " in (runs["skip"].folder / "skipped.txt").read_text()


def test_the_demo_answers_and_says_where_the_weights_are(runs) -> None:
    run = runs["demo"]
    assert run.code == 0, run.output
    lines = run.output.strip().splitlines()
    assert any(line.startswith("answered: ") for line in lines)
    assert lines[-2:] == [f"weights: {run.folder / 'model'}", f"talk to it: shardproof infer {run.folder}"]
    assert (run.folder / "loss.png").stat().st_size > 5000
    assert not (run.folder / "base").exists()


def test_bf16_trains_and_keeps_masters_in_fp32(runs) -> None:
    from safetensors.torch import load_file

    run = runs["bf16"]
    assert run.code == 0, run.output
    assert run.series("loss")[-1] < run.series("loss")[0]
    assert {w.dtype for w in load_file(run.folder / "model" / "model.safetensors").values()} == {torch.float32}
    assert list(run.folder.rglob("events.out.tfevents*"))


def test_one_epoch_is_every_row_once_rounded_up_to_whole_steps(runs) -> None:
    assert runs["epochs"].code == 0, runs["epochs"].output
    assert runs["epochs"].series("step")[-1] == 3


@pytest.mark.slow
def test_it_runs_under_an_outer_torchrun(runs, sft, tmp_path: Path) -> None:
    argv = sft("--stage", "3", "--val-split", "0.2", "--system", "be short")
    argv[argv.index("OUT")] = str(tmp_path / "out")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*torchrun, "-m", "shardproof", *argv],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line).get("loss") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[:5] == pytest.approx(runs["full"].series("loss"), abs=1e-6)
    assert done.stdout.count("step 1/5") == 1
