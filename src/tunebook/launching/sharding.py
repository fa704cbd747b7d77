"""FSDP2: which recipes may be trained with the model sharded over the processes, and why the others may not."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tunebook.errors import Problem
from tunebook.launching.command import Launch, is_true
from tunebook.recipe.schema import Recipe

BY_DDP = "or start it with accelerate_configs/ddp.yaml"
# What was seen to give the adapter of DDP; anything else about an adapter or an optimizer is refused.
PLAIN_LORA: Final = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights", "bias",
})  # fmt: skip
OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused")
# accelerate's switches that must be off, and why.
OFF: Final[Mapping[str, str]] = {
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "each process loads the base by itself, so that all start from the same weights",
    "FSDP_OFFLOAD_PARAMS": "offloaded weights were never seen to give the same adapter",
    "FSDP_ACTIVATION_CHECKPOINTING": "the recipe owns that, by training.activation_checkpointing",
}
SHARDING_NOTE = (
    "FSDP2 shards the model over the processes once each has loaded it whole: the base must fit one GPU at the start. "
    "No checkpoints are saved, so a run that breaks off starts over"
)


def is_sharded(launch: Launch, num_processes: int) -> bool:
    """Return whether accelerate will shard the model: FSDP of version 2, on several processes with GPUs."""
    asked = is_true(launch.environ.get("ACCELERATE_USE_FSDP")) and launch.environ.get("FSDP_VERSION") == "2"
    return asked and launch.device_type == "cuda" and num_processes > 1


def check_switches(environ: Mapping[str, str]) -> list[Problem]:
    """Refuse what an accelerate config may add to FSDP2 and what would not give the same adapter."""
    return [
        Problem(why, f"Set {name.lower()}: false in the accelerate config", where=name)
        for name, why in OFF.items()
        if is_true(environ.get(name))
    ]


def check_sharding(recipe: Recipe) -> list[Problem]:
    """Refuse what a sharded model is not trained with: anything but plain LoRA on an unquantised base, unsaved."""
    return [Problem(f"under FSDP2 {message}", fix, recipe.path, key) for key, message, fix in _objections(recipe)]


def _objections(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.lora is None:
        yield "lora", "a full fine-tune is not trained here: only plain LoRA is", f"Add a lora section, {BY_DDP}"
    if recipe.quantization is not None:
        yield "quantization", "quantised weights cannot be sharded", f"Drop the section for plain LoRA, {BY_DDP}"
    for name, value in (recipe.lora or {}).items():
        start = name == "init_lora_weights" and value not in (True, False, "gaussian")
        if name not in PLAIN_LORA or start or (name == "bias" and value != "none"):
            yield f"lora.{name}", f"only plain LoRA is trained, and {name}: {value} is more", f"Remove it, {BY_DDP}"
    if recipe.arguments.get("save_strategy") != "no":
        yield "training.save_strategy", "no checkpoints are saved", f'Set training.save_strategy: "no", {BY_DDP}'
    if recipe.arguments.get("optim") not in (None, *OPTIMIZERS):
        optim = recipe.arguments["optim"]
        yield "training.optim", f"the states of {optim} cannot be sharded", f"Use {' or '.join(OPTIMIZERS)}, {BY_DDP}"
    if recipe.model.dtype == "float16" or recipe.arguments.get("fp16"):
        yield "model.dtype", "float16 would need a loss scale over all shards", f"Use bfloat16, {BY_DDP}"
    if recipe.batch.check_replicas is not None:
        yield "training.check_replicas", "there are no replicas to compare", "Remove it"


def whole(tensor: Any) -> Any:
    """Return a tensor as it is, or put together from all processes where it is sharded; each must then call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
