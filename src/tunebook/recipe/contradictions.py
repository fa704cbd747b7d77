"""Keys that are each right and cannot stand together, or that this installation cannot serve."""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from tunebook.errors import Problem
from tunebook.recipe.checking import Report, Sections, Undecided
from tunebook.recipe.data_checks import DATA_CHECKS
from tunebook.recipe.hub_checks import HUB_CHECKS
from tunebook.recipe.lora_checks import LORA_CHECKS
from tunebook.recipe.rules import FOLLOW_THE_LOSS, OPTIMIZER_PACKAGES, REPORT_PACKAGES, SENDING_VARIABLES
from tunebook.recipe.schema import AUTO
from tunebook.recipe.source import Source
from tunebook.recipe.values import nearest_divisors
from tunebook.system.places import is_local, is_local_data

PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
STEP_KEYS = {"eval_steps": "eval_strategy", "save_steps": "save_strategy", "logging_steps": "logging_strategy"}


def find_contradictions(sections: Mapping[str, dict[str, Any] | None], source: Source) -> list[Problem]:
    """Return every contradiction between the keys of the sections, each at the line of the key that should change."""
    problems: list[Problem] = []

    def report(key: str, message: str, fix: str) -> None:
        problems.append(Problem(message, fix, source.place(key), key))

    for check in CHECKS:
        with suppress(Undecided):
            check(Sections(sections, source.undecided), report)
    return problems


def _check_bits(sections: Sections, report: Report) -> None:
    if not sections.has("quantization"):
        return
    four, eight = sections.get("quantization.load_in_4bit", False), sections.get("quantization.load_in_8bit", False)
    if four and eight:
        report("quantization.load_in_8bit", "load_in_4bit and load_in_8bit are both true", "Keep one of them")
    if not four and not eight:
        fix = "Write load_in_4bit: true, or leave the section out for an unquantised base"
        report("quantization", "neither load_in_4bit nor load_in_8bit is true", fix)
    for name in sections.written("quantization"):
        if name.startswith("bnb_4bit_") and eight and not four:
            report(f"quantization.{name}", "says something about 4 bits, and the base is loaded in 8", "Remove it")
        if name.startswith("llm_int8_") and four and not eight and name != "llm_int8_skip_modules":
            report(f"quantization.{name}", "says something about 8 bits, and the base is loaded in 4", "Remove it")


def _check_frozen_base(sections: Sections, report: Report) -> None:
    if sections.get("quantization.llm_int8_enable_fp32_cpu_offload"):
        fix = "Remove it; each process holds the whole model on its own device"
        report("quantization.llm_int8_enable_fp32_cpu_offload", "part of the model would leave the device", fix)
    if sections.has("quantization") and not sections.has("lora"):
        fix = "Add `lora: {}`, or remove the quantization section for full fine-tuning"
        report("quantization", "quantised weights cannot be trained, and there is no lora section", fix)


def _check_precision(sections: Sections, report: Report) -> None:
    dtype = sections.get("model.dtype", "auto")
    flags = {flag: sections.get(f"training.{flag}") for flag in PRECISION}
    if all(flags.values()):
        report("training.fp16", "bf16 and fp16 are both true", "Remove both; model.dtype is the compute type")
        return
    for flag, value in flags.items():
        fix = "Remove it; model.dtype is the compute type"
        if value and dtype not in ("auto", PRECISION[flag]):
            report(f"training.{flag}", f"is true and model.dtype is {dtype}", fix)
        elif value is False and dtype == PRECISION[flag]:
            report(f"training.{flag}", f"is false and model.dtype is {dtype}", fix)


def _check_compute_type(sections: Sections, report: Report) -> None:
    compute, dtype = sections.get("quantization.bnb_4bit_compute_dtype"), sections.get("model.dtype", "auto")
    if compute is not None and compute != dtype:
        fix = f"Remove it; it follows from model.dtype (set model.dtype: {compute} if that is meant)"
        report("quantization.bnb_4bit_compute_dtype", f"is {compute} and model.dtype is {dtype}", fix)


def _check_global_batch(sections: Sections, report: Report) -> None:
    whole, micro = sections.get("training.global_batch_size"), sections.get("training.per_device_train_batch_size", 1)
    if whole is None and micro == AUTO:
        message = "auto needs global_batch_size: without it the rows of a step grow with the micro-batch"
        report("training.per_device_train_batch_size", message, "Add training.global_batch_size, or give a number")
    if whole is None:
        return
    if sections.get("training.gradient_accumulation_steps") is not None:
        fix = "Remove it; accumulation is derived. Or remove global_batch_size"
        report("training.gradient_accumulation_steps", "is given beside global_batch_size", fix)
    if sections.get("training.learning_rate_scaling", "none") != "none":
        fix = "Remove it; nothing scales when the global batch is fixed"
        report("training.learning_rate_scaling", "is given beside global_batch_size", fix)
    if micro != AUTO and whole % micro:
        fix = f"Use {' or '.join(map(str, nearest_divisors(whole, micro, 2)))}"
        report("training.per_device_train_batch_size", f"{micro} does not divide global_batch_size {whole}", fix)


def _check_scaling(sections: Sections, report: Report) -> None:
    base = sections.get("training.learning_rate_base_processes")
    if base is not None and sections.get("training.learning_rate_scaling", "none") == "none":
        fix = "Set learning_rate_scaling to linear or sqrt, or remove it"
        report("training.learning_rate_base_processes", "has no effect without learning_rate_scaling", fix)


def _check_length_of_run(sections: Sections, report: Report) -> None:
    steps = sections.get("training.max_steps", -1)
    if steps != -1 and steps < 1:
        report("training.max_steps", f"got {steps}, expected a number of steps, at least 1", "Or remove it")
    elif steps > 0 and sections.get("training.num_train_epochs") is not None:
        report("training.max_steps", "is given beside num_train_epochs, which it would overrule", "Keep one of them")


def _check_step_counts(sections: Sections, report: Report) -> None:
    for name in ("warmup_steps", "logging_steps", "save_steps", "eval_steps"):
        value = sections.get(f"training.{name}")
        if isinstance(value, float) and value > 1 and value != int(value):
            message = f"got {value}, expected whole steps, or a fraction below 1"
            report(f"training.{name}", message, f"Write {round(value)}")


def _check_step_strategies(sections: Sections, report: Report) -> None:
    for name, strategy in STEP_KEYS.items():
        given = sections.get(f"training.{strategy}", None if strategy == "eval_strategy" else "steps")
        if sections.get(f"training.{name}") is not None and given not in (None, "steps"):
            report(f"training.{name}", f"has no effect while {strategy} is {given}", "Remove one of them")


def _check_workers(sections: Sections, report: Report) -> None:
    if sections.get("training.dataloader_num_workers"):
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if sections.get(f"training.{name}"):
            report(f"training.{name}", "has no effect without dataloader_num_workers", "Remove it")


def _check_held_out(sections: Sections, report: Report) -> None:
    if sections.get("data.validation", 0):
        return
    fix = "Set data.validation, for example 0.02, or remove it"
    for key in ("training.eval_steps", "training.eval_delay", "data.answer_rows"):
        if sections.get(key):
            report(key, "no rows are held out", fix)
    for key in ("training.eval_strategy", "training.load_best_model_at_end"):
        if sections.get(key, "no") not in ("no", False):
            report(key, "no rows are held out", fix)
    if sections.get("training.save_strategy") == "best":
        report("training.save_strategy", "best needs a held-out loss, and no rows are held out", fix)
    schedule = sections.get("training.lr_scheduler_type")
    if schedule in FOLLOW_THE_LOSS:
        report("training.lr_scheduler_type", f"{schedule} follows the held-out loss, and no rows are held out", fix)


def _check_overflow(sections: Sections, report: Report) -> None:
    if sections.get("data.on_overflow") == "error" and sections.get("data.max_truncated_fraction") is not None:
        report("data.max_truncated_fraction", "has no effect while on_overflow is error", "Remove one of them")


def _check_packing(sections: Sections, report: Report) -> None:
    # transformers divides the noise by the root of the sequence's length (integrations/neftune.py).
    if sections.get("data.packing") and sections.get("training.neftune_noise_alpha"):
        message = "would be weaker with packing, which joins rows: it is scaled by the length of the sequence"
        report("training.neftune_noise_alpha", message, "Remove it, or set data.packing: false")


def _check_best_model(sections: Sections, report: Report) -> None:
    if not sections.get("data.validation", 0):
        return
    metric, greater = sections.get("training.metric_for_best_model"), sections.get("training.greater_is_better")
    if metric not in (None, "loss", "eval_loss"):
        report(
            "training.metric_for_best_model",
            f"got {metric}, and the held-out loss is all that is measured",
            "Remove it",
        )
    if greater:
        report("training.greater_is_better", "the held-out loss is better when it is lower", "Remove it")
    best, save = sections.get("training.load_best_model_at_end"), sections.get("training.save_strategy")
    evaluate = sections.get("training.eval_strategy", "epoch")
    schedule = sections.get("training.lr_scheduler_type")
    if evaluate == "no":
        for key, needs in (("load_best_model_at_end", best), ("save_strategy", save == "best")):
            if needs:
                report(f"training.{key}", "chooses by the held-out loss, and eval_strategy is no", "Set eval_strategy")
        if schedule in FOLLOW_THE_LOSS:
            report(
                "training.lr_scheduler_type", "follows the held-out loss, and eval_strategy is no", "Set eval_strategy"
            )
    elif best and save not in (None, "best", evaluate):
        message = f"needs a checkpoint at each evaluation; save_strategy is {save}, eval_strategy {evaluate}"
        report("training.load_best_model_at_end", message, f"Set save_strategy: {evaluate}")
    elif best and save == evaluate == "steps":
        save_steps, eval_steps = sections.get("training.save_steps"), sections.get("training.eval_steps")
        if save_steps and eval_steps and save_steps % eval_steps:
            report("training.save_steps", f"{save_steps:g} is no multiple of eval_steps {eval_steps:g}", "Make it one")


def _check_checkpointing(sections: Sections, report: Report) -> None:
    kwargs = sections.get("training.activation_checkpointing_kwargs") or {}
    if kwargs and sections.get("training.activation_checkpointing", True) is False:
        report(
            "training.activation_checkpointing_kwargs",
            "has no effect while activation_checkpointing is false",
            "Remove it",
        )
    if kwargs.get("use_reentrant"):
        fix = "Remove it; the non-reentrant form is used"
        message = "use_reentrant: true marks LoRA parameters ready twice, at which DDP stops"
        report("training.activation_checkpointing_kwargs", message, fix)


def _check_idle_keys(sections: Sections, report: Report) -> None:
    if sections.get("training.liger_kernel_config") and not sections.get("training.use_liger_kernel"):
        report("training.liger_kernel_config", "has no effect without use_liger_kernel", "Remove it, or turn that on")
    optimizer = sections.get("training.optim", "adamw_torch_fused")
    if sections.get("training.optim_target_modules") and not optimizer.startswith(("galore", "apollo")):
        report("training.optim_target_modules", f"has no effect on {optimizer}", "Remove it")
    plain = ("adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor")
    if sections.get("training.optim_args") and optimizer.startswith(plain) and not optimizer.endswith("bit"):
        report("training.optim_args", f"has no effect on {optimizer}", "Remove it")


def _check_local_revisions(sections: Sections, report: Report) -> None:
    if sections.get("model.revision") and is_local(sections.get("model.name_or_path", "a/b")):
        report("model.revision", "has no effect on a local folder", "Remove it")
    if is_local_data(sections.get("data.path") or "a/b"):
        for name in ("revision", "split"):
            if sections.get(f"data.{name}") is not None:
                report(f"data.{name}", "has no effect on local files", "Remove it")


def _check_reports(sections: Sections, report: Report) -> None:
    wanted = sections.get("training.report_to") or []
    for name in [wanted] if isinstance(wanted, str) else wanted:
        package, variable = REPORT_PACKAGES.get(name), f"{name.upper()}_DISABLED"
        if package and find_spec(package) is None:
            report("training.report_to", f"{name} needs a package that is not installed", f"pip install {package}")
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            message = f"names {name}, and {variable} in the environment turns it off"
            report("training.report_to", message, f"unset {variable}")
        for variable in SENDING_VARIABLES if name in ("trackio", "all") else ():
            if os.environ.get(variable):
                message = f"trackio stores a run on this machine alone, and {variable} in the environment sends it away"
                report("training.report_to", message, f"unset {variable}")


def _check_averaged_weights(sections: Sections, report: Report) -> None:
    if sections.get("training.optim", "").startswith("schedule_free"):
        message = "trains at other weights than those it is measured and saved with, which is not built here"
        report("training.optim", message, "Use adamw_torch, with training.lr_scheduler_type")


def _check_packages(sections: Sections, report: Report) -> None:
    optimizer = sections.get("training.optim", "")
    for prefix, package in OPTIMIZER_PACKAGES.items():
        if optimizer.startswith(prefix) and find_spec(package) is None:
            report("training.optim", f"{optimizer} needs a package that is not installed", f"pip install {package}")
    if sections.get("training.use_liger_kernel") and find_spec("liger_kernel") is None:
        report("training.use_liger_kernel", "needs a package that is not installed", "pip install liger-kernel")
    attention = sections.get("model.attn_implementation") or ""
    if attention.startswith("flash_attention") and find_spec("flash_attn") is None and find_spec("kernels") is None:
        fix = "Use sdpa, or pip install flash-attn on a machine with GPUs"
        report("model.attn_implementation", f"{attention} needs a package that is not installed", fix)


CHECKS = (
    *LORA_CHECKS,
    *DATA_CHECKS,
    *HUB_CHECKS,
    _check_bits,
    _check_frozen_base,
    _check_precision,
    _check_compute_type,
    _check_global_batch,
    _check_scaling,
    _check_length_of_run,
    _check_step_counts,
    _check_step_strategies,
    _check_workers,
    _check_held_out,
    _check_overflow,
    _check_packing,
    _check_best_model,
    _check_checkpointing,
    _check_idle_keys,
    _check_local_revisions,
    _check_reports,
    _check_averaged_weights,
    _check_packages,
)
