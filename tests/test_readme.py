"""The README keeps its word: its commands run, its paths exist, its first command comes early."""

import importlib
import re
import shlex

import pytest

from checkout import ROOT, make_checkout, type_command
from tunebook.launching.command_line import read_command

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Lines that need what a test machine lacks carry this mark, and are checked through --plan.
GPU_MARK = "# needs GPUs"


def commands() -> list[str]:
    """Return the lines of all bash blocks, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def without_comment(command: str) -> str:
    return re.sub(r"\s+#.*$", "", command).strip()


def test_the_first_command_comes_by_line_25():
    assert README.splitlines().index("```bash") < 25


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {word for command in commands() if command.startswith("make ") for word in [command.split()[1]]}
    assert targets >= {"quickstart", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_every_path_exists():
    code = re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", README, flags=re.S)
    words = [word for pair in code for text in pair for word in re.split(r"[\s(),:=]+", text)]
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    made = ("runs", "recipes/mine")
    paths = {word for word in words if word.split("/")[0] in folders and "/" in word and not word.startswith(made)}
    assert paths and links
    missing = [path for path in (*paths, *links) if not (ROOT / path).exists()]
    assert not missing


def test_gpu_commands_plan_without_gpu_and_hub(monkeypatch, capsys):
    marked = [without_comment(command) for command in commands() if GPU_MARK in command]
    assert len(marked) >= 2
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    story = importlib.import_module("finetune").finetune
    for command in marked:
        num = re.search(r"--(?:num_processes|nproc_per_node) (\d+)", command)
        assert num, command
        words = shlex.split(command)
        words = words[words.index("finetune.py") + 1 :]
        story(read_command([*words, "--plan", "--num-processes", num[1]]))
        assert f"plan: {num[1]} processes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_every_other_command_runs(tmp_path):
    checkout = make_checkout(tmp_path)
    others = [command for command in commands() if GPU_MARK not in command and not command.startswith("make ")]
    assert others
    for command in map(without_comment, others):
        result = type_command(command, checkout)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
