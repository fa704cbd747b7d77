"""Imports point one way, files and functions stay short, heavy imports wait for an accepted recipe."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tunebook"

# From the ground up. A module may import what stands before it, and its own package's modules as listed.
ORDER = [
    "system",
    "system.secret_text",
    "system.spelling",
    "errors",
    "system.collection",
    "system.quiet",
    "system.hardware",
    "system.signals",
    "system.whereabouts",
    "system.watchdog",
    "system.network",
    "system.meeting",
    "system.writing",
    "runs",
    "runs.checkpoints",
    "system.places",
    "recipe.defaults",
    "recipe.rules",
    "recipe.schema",
    "recipe.source",
    "recipe.upstream",
    "recipe.values",
    "recipe.names",
    "recipe.json_schema",
    "recipe.checking",
    "recipe.lora_checks",
    "recipe.data_checks",
    "recipe.hub_checks",
    "recipe.contradictions",
    "recipe.reading",
    "recipe.hand_loop",
    "recipe.copying",
    "recipe",
    "launching",
    "launching.command_line",
    "launching.refusal",
    "launching.entry",
    "launching.command",
    "launching.sharding",
    "launching.checks",
    "launching.world",
    "launching.process_group",
    "launching.launch",
    "model",
    "model.shapes",
    "model.attention",
    "plan",
    "plan.randomness",
    "plan.trained_parts",
    "plan.optimizers",
    "plan.storage",
    "plan.layer_memory",
    "plan.memory",
    "plan.memory_limit",
    "plan.arithmetic",
    "plan.plan",
    "plan.table",
    "model.new_tokens",
    "launching.files",
    "data.making",
    "data.cache",
    "plan.memory_plan",
    "plan.gpu_fit",
    "runs.identity",
    "runs.lock",
    "runs.folder",
    "plan.durations",
    "runs.past",
    "runs.receipts",
    "hub",
    "hub.client",
    "hub.files",
    "hub.traffic",
    "hub.push",
    "hub.publishing",
    "data.conversation",
    "data.messages",
    "data.formats",
    "data.columns",
    "data.garbage",
    "data.record",
    "data.tables",
    "data.records",
    "data.hub",
    "data.sources",
    "data.drawing",
    "data.quarantine",
    "data.rows",
    "data.batches",
    "data.turn_shape",
    "data.templates",
    "data.prompts",
    "data.shown",
    "data.chat_prompts",
    "data.tokens",
    "data.overflow",
    "data.labels",
    "data.split",
    "data.ahead",
    "data.tokenise",
    "data.tokenizer",
    "data.unused_tokens",
    "data.prepare",
    "data",
    "model.lora_targets",
    "model.mutated_start",
    "model.lora_reach",
    "model.shares",
    "model.base_checks",
    "model.model",
    "model.adapter",
    "card",
    "card.public_text",
    "card.licence",
    "card.loss_picture",
    "card.code",
    "card.text",
    "card.card",
    "card.files",
    "plan.findings",
    "training.batches",
    "plan.padding",
    "plan.schedule",
    "plan.candidates",
    "training.row_masks",
    "training.packing",
    "training.collectives",
    "training.agreement",
    "training.unused_parameters",
    "training.loss",
    "training.head_loss",
    "training.measuring",
    "training.arguments",
    "training.trackers",
    "training.reporting",
    "training.progress",
    "training.summary",
    "training.stopping",
    "training.decoding",
    "training.answers",
    "training.shown_rows",
    "training.saving",
    "training.probing",
    "training.choosing",
    "training.ready",
    "training.resumable",
    "training.trainer",
    "training.outcome",
    "training.failures",
    "training.starting",
    "training.run",
    "training.result",
    "training.ending",
    "training",
    "plan.data_report",
    "plan.row_view",
    "plan.model_findings",
    "plan.planned_data",
    "plan.whole_plan",
    "plan.whole_plan_text",
    "plan.planning",
    "runs.charts",
    "runs.facts",
    "runs.report",
    "runs.differences",
    "runs.repro",
    "commands",
    "commands.bench",
    "commands.repro",
    "export",
    "export.adapter_check",
    "export.finished",
    "export.past_base",
    "export.exported",
    "export.export",
    "export.push_anew",
    "using",
    "using.trained",
    "using.asking",
    "using.streaming",
    "merge",
    "merge.published",
    "merge.computing",
    "merge.merging",
    "merge.verifying",
    "merge.verdict",
    "merge.saved_model",
    "merge.target",
    "merge.merge",
    "using.chat",
    "system.out_files",
    "using.prompt_files",
    "using.generate",
    "using.scores",
    "using.figures",
    "using.evaluate",
    "commands.use",
    "commands.new_recipe",
    "commands.group_trial",
    "commands.doctor",
    "commands.cli",
    "commands.start",
]
HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "bitsandbytes", "numpy", "pyarrow"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path) -> set[str]:
    """Return the tunebook modules that a file imports anywhere, those for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunebook"):
            module = (node.module or "").removeprefix("tunebook").removeprefix(".")
            for name in node.names:
                inner = f"{module}.{name.name}".removeprefix(".")
                found.add(inner if inner in ORDER else module)
        elif isinstance(node, ast.Import):
            found |= {name.name.removeprefix("tunebook.") for name in node.names if name.name.startswith("tunebook.")}
    return found - {""}


def test_every_module_has_its_place_in_the_order():
    names = {module_name(path) for path in sources()} - {"__init__"}
    assert names == set(ORDER), f"not placed: {names - set(ORDER)}, gone: {set(ORDER) - names}"
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_one_way(path):
    name = module_name(path)
    if name in ("__init__", ""):
        return
    above = {other for other in imported_modules(path) if ORDER.index(other) >= ORDER.index(name)}
    assert not above, f"{name} imports {above}, which stand above it"


def python_files() -> list[Path]:
    folders = [PACKAGE, ROOT / "scripts"]
    paths = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
    return [*paths, *(path for folder in folders for path in sorted(folder.rglob("*.py")))]


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 40, f"{node.name} has {length} lines"


def test_words_that_say_nothing_are_no_names():
    banned = ("cfg", "utils", "common", "helpers", "manager")
    for path in python_files():
        words = path.stem.split("_")
        words += [
            word
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            for word in node.name.lower().split("_")
        ]
        assert not set(words) & set(banned), path


def test_the_story_of_a_run_fits_on_a_page():
    assert (ROOT / "finetune.py").read_text(encoding="utf-8").count("\n") <= 50


def test_nothing_heavy_is_imported_before_a_recipe_is_accepted():
    script = "import sys; sys.path.insert(0, '.'); import finetune, tunebook.commands.cli, tunebook.plan.planning; "
    script += "print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not HEAVY & set(result.stdout.split())
