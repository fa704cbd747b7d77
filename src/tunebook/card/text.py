"""What a model card says of a run, line by line: figures as they were measured, and nothing that was not."""

from collections.abc import Mapping
from typing import Any

from tunebook.card.code import FOLDER, PLAIN_TEXT, Kind
from tunebook.card.public_text import cell, last_part
from tunebook.data.prompts import AlpacaPrompts
from tunebook.model.mutated_start import changes_base
from tunebook.plan.arithmetic import counted
from tunebook.plan.table import LEFT_OUT_WHEN_NONE, ROWS
from tunebook.recipe.schema import Recipe

# Rows of the plan's table that stand elsewhere on the card, or say where things are on this machine.
ELSEWHERE = {"recipe", "model", "model_revision", "run_dir"}
Row = tuple[str, str]


def measured_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what was measured before and after: held-out loss, exact answers, and the training loss."""
    rows = []
    if summary["eval_loss_before"] is not None or summary["eval_loss"] is not None:
        rows.append(("held-out loss", _number(summary["eval_loss_before"]), _number(summary["eval_loss"])))
    if summary["eval_token_accuracy"] is not None:
        rows.append(
            ("held-out tokens that are the first choice", "not measured", f"{summary['eval_token_accuracy']:.1%}")
        )
    if total := summary["num_exact_match_rows"]:
        before, after = (summary[f"exact_match_{when}"] for when in ("before", "after"))
        rows.append(("held-out prompts answered word for word", _share(before, total), _share(after, total)))
    first, last = _number(summary["first_loss"]), _number(summary["final_loss"])
    rows.append(("training loss, first and last logged", first, last))
    return rows


def measured_on(summary: Mapping[str, Any], step: int | None) -> str:
    """Return on what it was measured."""
    if not summary["num_eval_rows"]:
        return "No rows were held out, so nothing tells how it does on rows that it was not trained on."
    held_out = f"Held out were {counted(summary['num_eval_rows'], 'row')} of the same data, drawn with the seed"
    here = "" if step is None or summary["eval_loss"] is not None else f" Step {step} itself was not measured on them."
    return f"{held_out}; a loss is the mean over all tokens of the answers.{here}"


def source_rows(recipe: Recipe, summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return for each source its name, its revision and how much of it was taken."""
    rows = []
    for source in recipe.data.all_sources():
        public = source.path in (summary.get("hub_datasets") or ())
        if public:
            name = f"[{cell(source.path)}](https://huggingface.co/datasets/{source.path}), split {cell(source.split)}"
        else:
            name = f"local: {cell(last_part(source.path))}"
        default = "default branch" if public else ""
        taken = (
            f"{source.rows:,}"
            if source.rows is not None
            else "all"
            if source.weight == 1
            else f"{source.weight:g} x all"
        )
        rows.append((name, cell(source.revision) if source.revision else default, taken))
    return rows


def rows_text(summary: Mapping[str, Any]) -> str:
    """Return what became of the rows."""
    parts = [f"{summary['num_train_rows']:,} to train", f"{summary['num_eval_rows']:,} held out"]
    for name, what in (("quarantined", "unusable"), ("dropped", "dropped for their length"), ("truncated", "cut")):
        if number := summary[f"num_{name}_rows"]:
            parts.append(f"{number:,} {what}")
    return f"Rows: {', '.join(parts)}. Prompted by: {cell(last_part(summary['template']))}."


def whole_batch(plan: Mapping[str, Any]) -> str:
    """Return the arithmetic of a step in words."""
    processes = counted(plan["world_size"], "process")
    rows, steps = plan["per_device_train_batch_size"], plan["gradient_accumulation_steps"]
    whole = f"{processes} x {counted(rows, 'row')} x {counted(steps, 'micro-step')}"
    return f"{whole} = {counted(plan['global_batch_size'], 'row')} per optimizer step."


def plan_rows(plan: Mapping[str, Any]) -> list[Row]:
    """Return the plan of the run: each derived number by its name."""
    known = [row for row in ROWS if row[0] not in ELSEWHERE]
    return [
        (label, cell("unknown" if plan[name] is None else shown(plan[name])))
        for name, label, shown in known
        if not (plan[name] is None and name in LEFT_OUT_WHEN_NONE)
    ]


def receipt_rows(summary: Mapping[str, Any]) -> list[Row]:
    """Return what the run took and with what: figures that were not measured are left out."""
    processes = counted(summary["world_size"], "process")
    hardware = summary.get("hardware") or summary["device"]
    rows: list[Row] = [("hardware", cell(f"{hardware}, {processes}"))]
    for name, label, shown in (
        ("num_optimizer_steps", "optimizer steps", "{:,}".format),
        ("trained_tokens", "tokens trained on", "{:,}".format),
        ("processed_tokens", "tokens processed, prompts and padding included", "{:,}".format),
        ("tokens_per_second", "trained tokens per second", "{:,.1f}".format),
        ("training_seconds", "training time", _duration),
        ("wall_seconds", "time in all, loading and measuring included", _duration),
        ("peak_memory_bytes", "peak memory of a process", lambda size: f"{size / 2**30:.2f} GiB"),
    ):
        if (value := summary[name]) is not None:
            rows.append((label, cell(shown(value))))
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    rows.append(("versions", cell(versions)))
    rows.append(("sha256 of the recipe", f"`{summary['recipe_sha256']}`"))
    if summary["adapter_sha256"]:
        rows.append(("sha256 of the trained tensors, sorted by name", f"`{summary['adapter_sha256']}`"))
    return rows


def adapter_notes(recipe: Recipe, kind: Kind) -> list[str]:
    """Return what a reader of this kind of adapter must know."""
    lora = recipe.lora
    if lora is None or kind == "merged":
        return []
    notes = []
    if changes_base(lora):
        notes.append(
            f"It started from the base's own weights ({cell(lora['init_lora_weights'])}) and is saved as a plain LoRA "
            "of twice the rank, which any reader of LoRA adapters takes onto the unchanged base."
        )
    if lora.get("use_dora"):
        notes.append("It is a DoRA adapter: readers that know plain LoRA alone cannot take it.")
    if lora.get("use_rslora"):
        notes.append("It is scaled by lora_alpha / sqrt(r) (rsLoRA), as its adapter_config.json says.")
    if names := lora.get("modules_to_save"):
        notes.append(f"Beside LoRA it holds whole trained copies of {cell(', '.join(names))}.")
    if tokens := recipe.model.add_special_tokens:
        notes.append(
            f"It knows {counted(len(tokens), 'new token')}, whose rows it holds: the base needs room for them, which "
            "the code above makes where it lacks."
        )
    return notes


def pipeline_note(recipe: Recipe, summary: Mapping[str, Any], kind: Kind) -> list[str]:
    """Return how a pipeline of transformers takes it, where one can."""
    if kind != "adapter" and summary["template"] in (PLAIN_TEXT, AlpacaPrompts.name):
        return [
            f'`pipeline("text-generation", model={FOLDER})` takes it for texts as above, stop tokens included. For '
            "messages it would use the chat template of the tokenizer, on which this model was not trained."
        ]
    if kind != "adapter":
        return [f'`pipeline("text-generation", model={FOLDER})` takes it as it is, stop tokens included.']
    if recipe.model.add_special_tokens or not summary.get("public_base"):
        return []
    return [
        f'`pipeline("text-generation", model={FOLDER}, tokenizer={FOLDER})` takes it too; give its calls '
        f"`generation_config=GenerationConfig.from_pretrained({FOLDER})`, since transformers takes the tokens at which "
        "an answer stops from the base."
    ]


def limits_of(recipe: Recipe, summary: Mapping[str, Any], kind: Kind) -> list[str]:
    """Return what this model cannot do, or what nobody looked at."""
    limits = [
        "Nothing but the figures above was measured: no benchmark, and neither truth, safety nor bias. What the base "
        "gets wrong, this is likely to get wrong as well.",
        f"It saw no more than {recipe.data.max_length:,} tokens of a row, and prompts of the one form above.",
    ]
    if recipe.quantization is not None:
        bits = "4" if recipe.quantization.get("load_in_4bit") else "8"
        where = "This merged model's" if kind == "merged" else "On an unquantised base its"
        limits.append(
            f"It was trained on a base in {bits} bits. {where} answers differ a little from the trained ones."
        )
    if summary["num_truncated_rows"]:
        limits.append(f"{counted(summary['num_truncated_rows'], 'row')} lost the end of the answer to data.max_length.")
    if recipe.lora is not None and kind == "adapter":
        limits.append("It is of use with its own base alone; another one, even of the same size, gives nonsense.")
    return limits


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _share(share: float | None, total: int) -> str:
    return "not measured" if share is None else f"{round(share * total)} of {total}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
