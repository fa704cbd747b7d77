"""What a recipe's run will need of memory: how tunebook keeps each number, and what fits on a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tunebook.model.attention import kept_for_attention, spares_masks
from tunebook.model.shapes import ModelShape, count_lora_parameters
from tunebook.plan.memory import (
    CONSTANTS_BLOCK,
    CUDA_CONTEXT_BYTES,
    FLOAT32,
    GIB,
    LOGITS_AT_ONCE,
    QUANTIZED_BLOCK,
    Memory,
    Storage,
    Work,
    find_largest,
    predict_memory,
)
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.recipe.upstream import lora_keys

# Bytes of state for each trained weight, and bytes that a step computes with: the beginning of an optimizer's name.
# 8-bit states are blocks of 256 with a float32 scale for each of two moments; foreach updates take a root apart.
OPTIMIZERS: Final[Mapping[str, tuple[float, float]]] = {
    "adamw_torch_fused": (8, 0), "adamw_torch": (8, 4), "adamw_bnb_8bit": (2 + 8 / 256, 0), "adamw_8bit": (2.03, 0),
    "paged_adamw_8bit": (2 + 8 / 256, 0), "paged_adamw": (8, 0), "adamw_apex_fused": (8, 0), "adafactor": (0, 8),
    "sgd": (0, 0), "adagrad": (4, 4), "rmsprop": (4, 4), "lion_8bit": (1 + 4 / 256, 0), "paged_lion_8bit": (1.02, 0),
    "lion": (4, 0), "paged_lion": (4, 0), "ademamix_8bit": (3 + 12 / 256, 0), "ademamix": (12, 0),
}  # fmt: skip
# Above this share of a GPU what the allocator cannot reuse may be missing at the end.
TIGHT = 0.9
LARGEST_TRIED = 512
# Rows and the longest row's tokens of the fullest micro-batch, for a number of rows per process.
Fullest = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of one process, with activation checkpointing and without, for one micro-batch.

    `rows` x `length` tokens is the micro-batch that was taken, where joined rows are one; `taken` says why. `gpu_bytes`
    is what was asked for, and `largest_rows` the largest micro-batch that fits there in the recipe's own way (None:
    none does). `least` are the bytes that a single token needs: weights, gradients, optimizer and the context.
    """

    checkpointed: Memory
    kept: Memory
    activation_checkpointing: bool
    rows: int
    length: int
    taken: str
    context: int
    assumed: tuple[str, ...]
    gpu_bytes: int | None = None
    largest_rows: int | None = None
    least: int = 0

    @property
    def planned(self) -> Memory:
        """The memory of the way that the recipe chose."""
        return self.checkpointed if self.activation_checkpointing else self.kept

    @property
    def needed(self) -> int:
        """Bytes on the device, its context included."""
        return self.planned.total + self.context

    @property
    def fits(self) -> bool | None:
        """Whether it fits on the GPU that was asked about; None without one."""
        return None if self.gpu_bytes is None else self.needed <= self.gpu_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for --json."""
        found = asdict(self)
        for name in ("checkpointed", "kept"):
            found[name]["total"] = getattr(self, name).total
        return {**found, "needed": self.needed, "fits": self.fits}


def plan_memory(
    recipe: Recipe, plan: Plan, shape: ModelShape, fullest: Fullest | None, gpu_gib: float | None
) -> MemoryPlan:
    """Return the predicted memory of a process of this plan.

    `fullest` tells the fullest micro-batch of the data; without it every row is taken to be as long as max_length.
    """
    assumed: list[str] = []
    storage = storage_of(recipe, plan, shape, assumed)
    size_of: Fullest = fullest or (lambda rows: full_micro_batch(recipe, plan, rows))
    rows, length = size_of(plan.per_device_train_batch_size)
    taken = "the fullest micro-batch of the first epoch" if fullest else "every row as long as data.max_length"
    work = work_of(recipe, plan, shape, (rows, length), assumed)
    context = CUDA_CONTEXT_BYTES if plan.device_type == "cuda" or gpu_gib is not None else 0
    limit = None if gpu_gib is None else round(gpu_gib * GIB)

    def fits(size: int) -> bool:
        there = work_of(recipe, with_micro_batch(recipe, plan, size), shape, size_of(size), [])
        return limit is not None and predict_memory(shape, storage, there).total + context <= limit

    largest = None if limit is None else find_largest(find_sizes(recipe, plan), fits)
    return MemoryPlan(
        checkpointed=predict_memory(shape, storage, replace(work, checkpointing=True)),
        kept=predict_memory(shape, storage, replace(work, checkpointing=False)),
        activation_checkpointing=plan.activation_checkpointing,
        rows=rows,
        length=length,
        taken=taken,
        context=context,
        assumed=tuple(assumed),
        gpu_bytes=limit,
        largest_rows=largest,
        least=predict_memory(shape, storage, replace(work, rows=1, length=1, checkpointing=True)).total + context,
    )


def full_micro_batch(recipe: Recipe, plan: Plan, rows: int) -> tuple[int, int]:
    """Return rows and tokens of a micro-batch of rows that are all as long as data.max_length; packing joins them."""
    return (1, rows * plan.max_length) if recipe.data.packing else (rows, plan.max_length)


def with_micro_batch(recipe: Recipe, plan: Plan, rows: int) -> Plan:
    """Return the plan with another micro-batch: accumulation follows where the recipe gives the global batch."""
    if recipe.batch.global_batch_size is None:
        whole = plan.world_size * rows * plan.gradient_accumulation_steps
        return replace(plan, per_device_train_batch_size=rows, global_batch_size=whole)
    accumulation = plan.global_batch_size // (plan.world_size * rows)
    return replace(plan, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)


def storage_of(recipe: Recipe, plan: Plan, shape: ModelShape, assumed: list[str]) -> Storage:
    """Return how this run keeps its numbers (model.py): what is trained in float32, the rest in the compute type."""
    compute = FLOAT32 if plan.compute_dtype == "float32" else 2
    optimizer, step = count_optimizer_bytes(plan.optim, assumed)
    quantized, constants = _quantization_bytes(recipe, shape)
    is_full = recipe.lora is None
    return Storage(
        compute=compute,
        residual=FLOAT32 if is_full else compute,
        frozen=compute,
        optimizer=optimizer,
        step=step,
        bucket=FLOAT32 if plan.world_size > 1 else 0,
        copies=compute if compute < FLOAT32 else 0,
        quantized=quantized,
        constants=constants,
        dequantized=compute if quantized else 0,
        # Under autocast each layer converts its float32 input for itself; 4-bit layers take the compute type as it is.
        converts_inputs=compute < FLOAT32 and not quantized,
    )


def work_of(recipe: Recipe, plan: Plan, shape: ModelShape, micro_batch: tuple[int, int], assumed: list[str]) -> Work:
    """Return what is trained, on a micro-batch given as rows and tokens of each; joined ones are a single row."""
    rows, length = micro_batch
    adapter, rank = None, 0
    if recipe.lora is not None:
        rank = recipe.lora.get("r") or lora_keys()["r"].default
        adapter = count_lora_parameters(shape, recipe.lora, rank)
        if adapter is None:
            adapter = count_lora_parameters(shape, {}, rank)
            assumed.append("the adapter is counted as one on all linear layers")
    chosen = "eager" if shape.model_type == "gemma2" else "sdpa"  # transformers: no sdpa with softcap
    attention = recipe.model.attn_implementation or chosen
    joined = recipe.data.packing and plan.per_device_train_batch_size > 1
    spared = not recipe.compiles and spares_masks(shape.shares_keys, plan.device_type, plan.compute_dtype)
    kept = kept_for_attention(attention, shape, length, joined=joined, spared=spared)
    return Work(
        rows=rows,
        length=length,
        adapter=adapter,
        rank=rank,
        checkpointing=plan.activation_checkpointing,
        keeps_gradients=plan.gradient_accumulation_steps > 1,
        masked=kept.masked,
        repeats_keys=kept.repeats_keys,
        eager_attention=attention == "eager",
        logits_at_once=LOGITS_AT_ONCE if recipe.batch.fused_loss == "auto" and not recipe.compiles else None,
    )


def count_optimizer_bytes(name: str, assumed: list[str]) -> tuple[float, float]:
    """Return an optimizer's bytes of state for each trained weight, and those that a step computes with."""
    known = [beginning for beginning in OPTIMIZERS if name.startswith(beginning)]
    if not known:
        assumed.append(f"the states of {name} are counted as AdamW's")
        return OPTIMIZERS["adamw_torch"]
    return OPTIMIZERS[max(known, key=len)]


def _quantization_bytes(recipe: Recipe, shape: ModelShape) -> tuple[float, float]:
    """Return bytes per weight and bytes of constants per weight (bitsandbytes; Dettmers et al. 2023, section 3)."""
    given = recipe.quantization
    if given is None:
        return 0, 0
    if not given.get("load_in_4bit"):
        return 1, FLOAT32 / shape.hidden_size  # a float32 scale for each row of a weight
    if given.get("bnb_4bit_use_double_quant"):
        return 0.5, 1 / QUANTIZED_BLOCK + FLOAT32 / QUANTIZED_BLOCK / CONSTANTS_BLOCK
    return 0.5, FLOAT32 / QUANTIZED_BLOCK


def find_sizes(recipe: Recipe, plan: Plan) -> list[int]:
    """Return the micro-batches that keep the global batch; with the classic pair any number does."""
    if recipe.batch.global_batch_size is None:
        return list(range(1, LARGEST_TRIED + 1))
    share = plan.global_batch_size // plan.world_size
    return [size for size in range(1, min(share, LARGEST_TRIED) + 1) if share % size == 0]


def find_memory_warnings(memory: MemoryPlan, recipe: Recipe, plan: Plan) -> list[tuple[str, str, str]]:
    """Return what a user should know about the GPU that was asked about, each with its fix and the key to set."""
    if memory.gpu_bytes is None or memory.needed <= TIGHT * memory.gpu_bytes:
        return []
    gpu = f"of {memory.gpu_bytes / GIB:g} GiB"
    if memory.least > memory.gpu_bytes:
        message = "a process does not fit: weights, gradients and optimizer alone need "
        return [(f"{message}{memory.least / GIB:.1f} {gpu}", *_fix_of_weights(recipe))]
    fixes, key = [], "training.per_device_train_batch_size"
    rows = plan.per_device_train_batch_size
    if memory.largest_rows and memory.largest_rows < rows:
        fixes.append(f"{key}: {memory.largest_rows}")
    elif memory.largest_rows and rows > 1:
        fixes.append(f"a smaller {key}")
    if not memory.activation_checkpointing and memory.checkpointed.total < memory.kept.total:
        fixes.append("training.activation_checkpointing: true")
    fixes.append("a smaller data.max_length")
    what = "does not fit: it needs" if memory.needed > memory.gpu_bytes else "fits with little to spare: it needs"
    return [(f"a process {what} {memory.needed / GIB:.1f} {gpu}", f"Set {', or '.join(fixes)}", key)]


def _fix_of_weights(recipe: Recipe) -> tuple[str, str]:
    """Return what makes the parts smaller that no batch changes, and the key it is about."""
    if recipe.lora is None:
        return "Add a lora section, with a quantization section if that is not enough, or take a larger GPU", "lora"
    if recipe.quantization is None:
        return "Add a quantization section, or take a larger GPU", "quantization"
    if not recipe.quantization.get("load_in_4bit"):
        return "Set load_in_4bit: true instead of 8 bits, or take a larger GPU", "quantization"
    return "Take a larger GPU, or a smaller model", "model.name_or_path"
