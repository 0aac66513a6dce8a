"""Promises of the project as a whole: cheap imports, arrows between rooms, files that agree with each other."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported_by(code: str) -> set[str]:
    """Top-level modules in a fresh process after `code`."""
    code += "\nimport sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "datasets", "pyarrow", "numpy", "trl", "peft", "accelerate"}


@pytest.mark.parametrize(
    "code",
    [
        "import shardproof",
        "import shardproof.data.rows, shardproof.data.encoding.encode, shardproof.data.encoding.template",
        "import shardproof.models.tiny",
        "from shardproof.data.rows import read_rows; read_rows(['stdlib#10'])",
    ],
)
def test_importing_is_cheap(code):
    assert not imported_by(code) & HEAVY


def test_the_arrows_between_rooms_run_down_only():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_dependency_is_pinned_and_torch_as_make_pins_it():
    def key(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {key(line.partition("==")[0]): line.partition("==")[2] for line in lines if line and line[0] != "#"}
    assert all(pins.values()), "every constraint is exact"
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("train", "media", "video", "dev"):
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    missing = [name for name in wanted if key(re.split(r"[<>=!~\[; ]", name)[0]) not in pins]
    assert not missing
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^TORCH\s*\?=\s*{re.escape(pins['torch'])}$", makefile, re.MULTILINE)


def test_the_sdist_has_what_the_repository_has():
    """All but what begins with a dot."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    there = {f"/{name}" for name in listed.stdout.split() if not name.startswith(".")}
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]) == there


# Dependencies that no line of ours imports.
FOR_OTHERS = {
    "accelerate": "transformers' Trainer",
    "tensorboard": "--report-to tensorboard, through torch",
    "liger-kernel": "--liger-kernel, through transformers",
    "deepspeed": "the benchmarks, in a process of its own",
    "mkdocs-material": "the theme of the site",
    "mkdocstrings": "its Python interface",
    "expecttest": "torch's samples of its operations",
}
TOOLS = {"import-linter", "mypy", "pytest-timeout", "pytest-xdist", "ruff", "types-PyYAML"}
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "scikit-learn": "sklearn", "modelscope-hub": "modelscope_hub"}
MODULES |= {"compressed-tensors": "compressed_tensors"}
MODULES |= {"sentence-transformers": "sentence_transformers", "pytorch-lightning": "pytorch_lightning"}


def test_every_dependency_is_used():
    python = [
        file for room in ("src", "tests", "benchmarks", "examples", "docs") for file in (ROOT / room).rglob("*.py")
    ]
    imported = set(
        re.findall(r"^\s*(?:import|from) (\w+)", "\n".join(file.read_text() for file in python), re.MULTILINE)
    )
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=!~\[; ]", name)[0] for name in wanted}
    assert not {name for name in names - TOOLS if MODULES.get(name, name) not in imported | FOR_OTHERS.keys()}


def test_the_readme_names_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_no_module_is_long():
    """STYLE: no file over 400 lines, unless its docstring gives the reason."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "src").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_one_module_knows_accelerators():
    """Elsewhere `torch.accelerator` serves, so that other devices than CUDA's do what they do."""
    kinds = {"cuda", "npu", "xpu", "mps"}
    named = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in kinds
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert not named


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "\nversion" not in (ROOT / "CITATION.cff").read_text()


def test_issue_forms_and_the_citation_can_be_read():
    yaml = pytest.importorskip("yaml")
    for form in (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"):
        read = yaml.safe_load((ROOT / form).read_text())
        assert {"name", "description", "body"} <= read.keys()
        ids = [field["id"] for field in read["body"]]
        assert len(ids) == len(set(ids))
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["title"] == PROJECT["project"]["name"]


PATCHED = """
import sys, types
import torch, torch.distributed, torch.nn.utils, torch.utils.checkpoint, torch.optim
from torch.distributed import fsdp, tensor  # what is imported on the way is no patch

def seen():
    rooms = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"
             and name != "torch.compiler._cache"]  # torch itself adds to it
    found = {}
    for room in rooms:
        for name, value in list(vars(room).items()):
            mine = getattr(value, "__module__", None) == room.__name__
            if isinstance(value, types.FunctionType) and mine:
                found[room.__name__, name] = value
            elif isinstance(value, type) and mine:
                found |= {(room.__name__, name, key): of for key, of in vars(value).items() if callable(of) or
                          isinstance(of, (staticmethod, classmethod, property))}
    return found

before = seen()
import shardproof
from shardproof.zero import api
model = shardproof.shard(torch.nn.Linear(4, 4), 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
after = seen()
print(sorted(str(name) for name in before if after.get(name) is not before[name] and not name[-1].startswith("__")))
"""


def test_nothing_of_torch_is_patched():
    """STYLE: what others do with torch in the same process is as it would be without us."""
    told = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == "[]"


def test_only_tests_that_are_marked_slow_are(tmp_path: Path) -> None:
    """And not all that lie in a folder of that name, as a checkout may."""
    tests = tmp_path / "slow" / "machines"
    tests.mkdir(parents=True)
    for name in ("conftest.py", "aside.py", "distributed"):
        (tests / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    marked = "import pytest\n\n\ndef test_a():\n    pass\n\n\n@pytest.mark.slow\ndef test_b():\n    pass\n"
    (tests / "test_slow.py").write_text(marked)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "slow/machines/test_slow.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 passed, 1 skipped" in found.stdout, found.stdout + found.stderr


@pytest.mark.parametrize("folder", ["examples", "benchmarks", "docs", "tests"])
def test_what_is_imported_from_here_is_there(folder: str) -> None:
    """Also inside of functions that only slow tests call."""
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.level == 0
                and (node.module or "").split(".")[0] == "shardproof"
            ):
                found = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if not hasattr(found, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{name}")
    assert not missing
