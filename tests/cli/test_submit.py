"""Promise: what `shardproof submit` writes is what Slurm runs and what Kubeflow Trainer takes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardproof.cli.submit import run
from shardproof.errors import ConfigError
from train.conftest import rows, tiny  # noqa: F401

TRAIN = ["sft", "--model", "models/mine", "--dataset", "a b.jsonl", "--system", "it's", "--output-dir", "out"]

# The fields of a TrainJob that are written, as trainer.kubeflow.org/v1alpha1 has them (Kubeflow Trainer 2.x).
POD = {"volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}]}
POD["containers"] = [{"name": str, "volumeMounts": [{"name": str, "mountPath": str}]}]
ENV = {"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
PATCH = {"replicatedJobs": [{"name": str, "template": {"spec": {"template": {"spec": POD}}}}]}
AMOUNTS = {"nvidia.com/gpu": str, "cpu": str, "memory": str}
TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "runtimeRef": {"name": str},
        "runtimePatches": [{"manager": str, "trainingRuntimeSpec": {"template": {"spec": PATCH}}}],
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"requests": AMOUNTS, "limits": AMOUNTS},
            "env": [ENV],
        },
    },
}


def check_fields(value: Any, schema: Any, path: str = "job") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for name, inner in value.items():
            assert name in schema, f"{path}.{name} is no field"
            check_fields(inner, schema[name], f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for inner in value:
            check_fields(inner, schema[0], path)
    else:
        assert type(value) is schema, path


def written(capsys: pytest.CaptureFixture[str], *argv: str, command: list[str] = TRAIN) -> str:
    assert run([*argv, "--", *command]) == 0
    return capsys.readouterr().out


def test_a_train_job_has_the_fields_of_the_published_schema(capsys):
    many = ["--nodes", "4", "--nproc", "8", "--image", "team/image:1", "--volume", "data=/data", "--env", "A=1"]
    more = ["--secret-env", "HF_TOKEN=hub/token", "--namespace", "team", "--memory", "512Gi", "--cpus", "64"]
    job = yaml.safe_load(written(capsys, "k8s", *many, *more))
    check_fields(job, TRAIN_JOB)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["command"] == ["torchrun", "-m", "shardproof"]
    assert trainer["args"] == TRAIN
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi"}
    plain = yaml.safe_load(written(capsys, "k8s", "--gpus", "0"))
    check_fields(plain, TRAIN_JOB)
    assert "resourcesPerNode" not in plain["spec"]["trainer"]


def test_a_batch_script_is_bash_and_asks_for_what_was_said(capsys, tmp_path):
    wanted = ["--nodes", "2", "--nproc", "8", "--time", "12:00:00", "--partition", "gpu", "--slurm=--exclusive"]
    script = written(capsys, "slurm", *wanted, "--setup", "module load cuda", "--env", "A=b c")
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--nodes=2", "--gpus-per-node=8", "--time=12:00:00", "--partition=gpu", "--exclusive"):
        assert f"#SBATCH {line}" in lines
    assert "module load cuda" in lines
    assert "export A='b c'" in lines
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    file = tmp_path / "job.sh"
    written(capsys, "slurm", *wanted, "--output", str(file))
    assert file.read_text().startswith("#!/bin/bash\n#SBATCH")


def test_words_of_any_kind_arrive_as_they_are(capsys, tmp_path):
    """Quotes, spaces, other scripts, and what a shell or Kubernetes would put something else in the place of."""
    system = 'it\'s "here" $HOME `ls` $(PATH) 数据'
    train = ["sft", "--model", "m", "--dataset", "数 据.jsonl", "--system", system, "--output-dir", "out put"]
    env = f"NOTE={system}"
    wanted = ["--name", "my job", "--cpus", "4", "--env", env, "--setup", 'echo "$UNSET"']
    script = written(capsys, "slurm", "--nodes", "2", *wanted, command=train)
    assert "#SBATCH --job-name='my job'" in script.splitlines()
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in script  # since Slurm 22.05 it asks for one by itself
    say = tmp_path / "say"
    say.write_text('#!/bin/bash\necho "$NOTE"; printf "%s|" "$@"; echo\n')
    say.chmod(0o755)
    done = started(script.replace("exec shardproof", f"exec {say}"), tmp_path, 7)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(system + "\n") == 2
    assert done.stdout.count("|".join([*train, "--nproc", "1"]) + "|") == 2

    text = written(capsys, "k8s", "--env", env, command=train)
    assert "数据" in text
    trainer = yaml.safe_load(text)["spec"]["trainer"]
    as_kubernetes_has_it = [word.replace("$$(", "$(") for word in (*trainer["args"], trainer["env"][0]["value"])]
    assert as_kubernetes_has_it == [*train, system]
    assert "$(PATH)" not in text.replace("$$(", "")


def test_what_a_job_may_have_several_of_may_be_said_several_times(capsys):
    """As of docker and sbatch. An option of sbatch can be said with `=` only, and so one at a time."""
    several = ["--slurm=--exclusive", "--slurm=--qos=high", "--env", "A=1", "B=2", "--env", "C=3"]
    lines = written(capsys, "slurm", *several, "--setup", "one", "--setup", "two", command=TRAIN).splitlines()
    assert {"#SBATCH --exclusive", "#SBATCH --qos=high", "one", "two"} <= set(lines)
    assert {"export A=1", "export B=2", "export C=3"} <= set(lines)


def test_a_value_of_a_variable_may_have_commas(capsys):
    lines = written(capsys, "slurm", "--env", "GPUS=0,1,2", "A=1,B=2,3").splitlines()
    assert {"export GPUS=0,1,2", "export A=1", "export B=2,3"} <= set(lines)


def test_a_file_of_options_says_what_the_job_says_or_nothing(tmp_path, capsys):
    """The script gives --nproc itself, which wins over the file: eight processes became one."""
    file = tmp_path / "run.yaml"
    train = ["sft", str(file), "--model", "m", "--dataset", "d", "--output-dir", "o"]
    for text, told in (
        ("nproc: 8", "before the command: --nproc 8"),
        ("nnodes: '4'", "--nnodes 4 in the command: the job tells each node its rank, the number of nodes (--nodes 2)"),
        ("node_rank: 0", "--node-rank 0 in the command"),
        ("master_addr: here", "--master-addr here in the command"),
    ):
        file.write_text(text + "\n")
        with pytest.raises(ConfigError, match=re.escape(told)):
            run(["slurm", "--nodes", "2", "--", *train])
    file.write_text("nproc: 8\nnnodes: '1:2'\nmax_restarts: 1\nsave_steps: 9\nnode_rank:\n")
    assert "--nproc 8'" in written(capsys, "slurm", "--nodes", "2", "--nproc", "8", command=train)


def test_what_only_the_nodes_have_is_not_looked_for_here(capsys):
    there = ["--offload", "nvme:/scratch/of/nodes", "--new-special-tokens", "/data/of/nodes.txt"]
    assert "nvme:/scratch/of/nodes" in written(capsys, "slurm", command=[*TRAIN, *there])


def test_what_there_is_one_of_is_said_once():
    with pytest.raises(ConfigError, match="--nodes is given twice"):
        run(["slurm", "--nodes", "2", "--nodes=4", "--", *TRAIN])


def test_dollars_reach_a_train_job_as_they_are(capsys):
    """Kubernetes makes one dollar of two, and what stands between `$(` and `)` the value of a variable."""
    words = ["$$x", "a$$$b", "$$(X)", "$", "$$", "5$", "$(X)$(Y"]
    env = ["--env", *(f"V{number}={word}" for number, word in enumerate(words))]
    text = written(capsys, "k8s", *env, command=["sft", "--model", "m", "--dataset", "d", "--output-dir", "o"])
    found = yaml.safe_load(text)["spec"]["trainer"]["env"]
    expanded = [re.sub(r"\$(?:(\$)|\((\w*)\))", lambda m: m[1] or "VALUE", one["value"]) for one in found]
    assert expanded == words


def test_a_train_job_that_starts_ranks_again_is_told_where_they_meet(capsys):
    again = [*TRAIN, "--max-restarts", "3", "--save-steps", "10"]
    job = yaml.safe_load(written(capsys, "k8s", "--nodes", "2", command=again))
    check_fields(job, TRAIN_JOB)
    words = ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"]
    assert job["spec"]["trainer"]["command"] == ["torchrun", *words, "-m", "shardproof"]


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" & done
failed=0; for job in $(jobs -p); do wait "$job" || failed=1; done; exit $failed
"""


def programs(folder: Path) -> None:
    """What stands in for Slurm: nodes are processes here."""
    python = f'#!/bin/bash\nexec "{sys.executable}" -m shardproof "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n", "shardproof": python}.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)


def started(script: str, folder: Path, job: int) -> subprocess.CompletedProcess[str]:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    programs(bin_folder)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": str(job)}
    path = f"{bin_folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash"],
        input=script,
        env={**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_node_is_told_who_it_is(capsys, tmp_path):
    """The script with a command that only says what it was told."""
    script = written(capsys, "slurm", "--nodes", "2")
    # In one write: the other node's may come between two.
    said = 'printf "%s\\n" "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT" "$(printf "%s|" "$@")"'
    (tmp_path / "say").write_text(f"#!/bin/bash\n{said}\n")
    (tmp_path / "say").chmod(0o755)
    done = started(script.replace("exec shardproof", f"exec {tmp_path}/say"), tmp_path, 7)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "127" in line) == [
        "2 0 127.0.0.1 20007",
        "2 1 127.0.0.1 20007",
    ]
    assert done.stdout.count("|".join([*TRAIN, "--nproc", "1"]) + "|") == 2


@pytest.mark.slow
def test_the_batch_script_trains(capsys, tmp_path, tiny, rows):  # noqa: F811
    train = ["sft", "--model", str(tiny), "--dataset", str(rows), "--max-steps", "3", "--global-batch-size", "4"]
    script = written(capsys, "slurm", "--nodes", "2", command=[*train, "--output-dir", "out"])
    done = started(script, tmp_path, os.getpid())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 3 on 2 process(es)" in done.stdout
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["slurm", "sft"], "after a separate '--'"),
        (["pbs", "--", *TRAIN], "Nothing can be written for 'pbs'"),
        (["slurm", "--", "infer"], "sft or rlhf, not 'infer'"),
        (["slurm", "--", *TRAIN, "--stagge", "3"], "--stage"),
        (["slurm", "--", *TRAIN, "--nproc", "8"], "give it to submit"),
        (["slurm", "--", *TRAIN, "--nproc=8"], "give it to submit"),
        (["slurm", "--", *TRAIN[:-2]], "--output-dir is missing"),
        (["slurm", "--", "sft", "--output-dir", "o"], "--model and --dataset are missing"),
        (["slurm", "--", *TRAIN, "--lora-rank", "8"], "--lora-rank applies to adapters"),
        (["slurm", "--nodes", "3", "--", *TRAIN, "--global-batch-size", "4"], "cannot be dealt out"),
        (["slurm", "--image", "x", "--", *TRAIN], "--image is not for slurm"),
        (["k8s", "--partition", "x", "--", *TRAIN], "--partition is not for k8s"),
        (["k8s", "--name", "My Job", "--", *TRAIN], "use lower-case letters"),
        (["k8s", "--volume", "data=here", "--", *TRAIN], "must begin with a slash"),
        (["k8s", "--secret-env", "A=b", "--", *TRAIN], "name the secret and its key"),
        (["slurm", "--env", "MY-NAME=1", "--", *TRAIN], "MY-NAME is not a variable name"),
        (["slurm", "--name", "a\n#SBATCH --account=other", "--", *TRAIN], "must not contain line breaks"),
    ],
)
def test_what_cannot_run_is_refused(argv, text):
    with pytest.raises(ConfigError) as caught:
        run(argv)
    assert text in str(caught.value)
