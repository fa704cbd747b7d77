"""What a recipe's run will need of memory: how tunebook keeps each number, and what fits on a GPU."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunebook.model.attention import kept_for_attention, spares_masks
from tunebook.model.shapes import ModelShape
from tunebook.plan.memory import (
    CONSTANTS_BLOCK,
    CUDA_CONTEXT_BYTES,
    GIB,
    LOGITS_AT_ONCE,
    QUANTIZED_BLOCK,
    Memory,
    find_largest,
    predict_memory,
)
from tunebook.plan.optimizers import find_optimizer_bytes
from tunebook.plan.plan import Plan
from tunebook.plan.storage import BOOLEAN, FLOAT32, Storage, Work
from tunebook.plan.trained_parts import TrainedParts, find_trained_parts, skipped_share
from tunebook.recipe.schema import Recipe
from tunebook.recipe.upstream import lora_keys

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


def plan_memory(  # noqa: PLR0913, PLR0917 - what the data is like is optional
    recipe: Recipe, plan: Plan, shape: ModelShape, fullest: Fullest | None, gpu_gib: float | None, longest: int = 0
) -> MemoryPlan:
    """Return the predicted memory of a process of this plan.

    `fullest` tells the fullest micro-batch of the data; without it every row is taken to be as long as max_length.
    `longest` is its longest row (0: not known), which a batch of the evaluation can hold whatever the fullest
    micro-batch is.
    """
    assumed: list[str] = []
    on_gpu = plan.device_type == "cuda" or gpu_gib is not None
    parts = _adapter_parts(recipe, shape, assumed)
    storage = storage_of(recipe, plan, shape, parts, on_gpu, assumed)
    size_of: Fullest = fullest or (lambda rows: full_micro_batch(recipe, plan, rows))
    longest = min(longest or plan.max_length, plan.max_length)
    context = CUDA_CONTEXT_BYTES if on_gpu else 0
    limit = None if gpu_gib is None else round(gpu_gib * GIB)

    def work_at(size: int) -> Work:
        return work_of(recipe, with_micro_batch(recipe, plan, size), shape, parts, size_of(size), longest)

    def needed_by(work: Work) -> int:
        return predict_memory(shape, storage, work).total + context

    work = work_at(plan.per_device_train_batch_size)
    sizes = [] if limit is None else find_sizes(recipe, plan)
    return MemoryPlan(
        checkpointed=predict_memory(shape, storage, replace(work, checkpointing=True)),
        kept=predict_memory(shape, storage, replace(work, checkpointing=False)),
        activation_checkpointing=plan.activation_checkpointing,
        rows=work.rows,
        length=work.length,
        taken="the fullest micro-batch of the first epoch" if fullest else "every row as long as data.max_length",
        context=context,
        assumed=tuple(assumed),
        gpu_bytes=limit,
        largest_rows=find_largest(sizes, lambda size: needed_by(work_at(size)) <= (limit or 0)),
        least=needed_by(replace(work, rows=1, length=1, evaluated=0, checkpointing=True)),
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


def _adapter_parts(recipe: Recipe, shape: ModelShape, assumed: list[str]) -> TrainedParts | None:
    """Return what an adapter trains, None for a full fine-tune."""
    if recipe.lora is None:
        return None
    return find_trained_parts(shape, recipe.lora, _rank(recipe), len(recipe.model.add_special_tokens or ()), assumed)


def _rank(recipe: Recipe) -> int:
    return int((recipe.lora or {}).get("r") or lora_keys()["r"].default)


def storage_of(  # noqa: PLR0913, PLR0917 - the last is filled
    recipe: Recipe, plan: Plan, shape: ModelShape, parts: TrainedParts | None, on_gpu: bool, assumed: list[str]
) -> Storage:
    """Return how this run keeps its numbers (model.py): what is trained in float32, the rest in the compute type."""
    compute = FLOAT32 if plan.compute_dtype == "float32" else 2
    optimizer = find_optimizer_bytes(plan.optim, on_gpu, assumed)
    quantized, constants = _quantization_bytes(recipe, shape, compute)
    # What is trained is in float32: the embedding that the stream between layers begins with, and DoRA's magnitudes,
    # after which 4-bit layers return what they were given.
    has_dora = bool(recipe.lora and recipe.lora.get("use_dora"))
    is_wide = parts is None or parts.embedding == "all" or (has_dora and quantized > 0)
    return Storage(
        compute=compute,
        residual=FLOAT32 if is_wide else compute,
        frozen=compute,
        optimizer=optimizer.states,
        step=optimizer.at_once,
        step_of_largest=optimizer.of_largest,
        bucket=FLOAT32 if plan.world_size > 1 else 0,
        copies=compute if compute < FLOAT32 else 0,
        quantized=quantized,
        constants=constants,
        dequantized=compute if quantized else 0,
        # Under autocast each layer converts its float32 input for itself; 4-bit layers take the compute type as it is.
        converts_inputs=compute < FLOAT32 and (is_wide or not quantized),
        mask=BOOLEAN if on_gpu else (compute if quantized else FLOAT32),
        gives_float32=is_wide and quantized > 0,
    )


def work_of(  # noqa: PLR0913, PLR0917 - each is a part of what is worked on
    recipe: Recipe,
    plan: Plan,
    shape: ModelShape,
    parts: TrainedParts | None,
    micro_batch: tuple[int, int],
    longest: int,
) -> Work:
    """Return what is trained, on a micro-batch given as rows and tokens of each; joined ones are a single row."""
    rows, length = micro_batch
    lora = recipe.lora or {}
    chosen = "eager" if shape.model_type == "gemma2" else "sdpa"  # transformers: no sdpa with softcap
    attention = recipe.model.attn_implementation or chosen
    joined = recipe.data.packing and plan.per_device_train_batch_size > 1
    spared = not recipe.compiles and spares_masks(shape.shares_keys, plan.device_type, plan.compute_dtype)
    kept = kept_for_attention(attention, shape, length, joined=joined, spared=spared)
    evaluated, evaluated_length = _evaluation_batch(recipe, plan, length, longest)
    return Work(
        rows=rows,
        length=length,
        adapter=None if parts is None else parts.number,
        rank=0 if parts is None else _rank(recipe),
        checkpointing=plan.activation_checkpointing,
        keeps_gradients=plan.gradient_accumulation_steps > 1,
        masked=kept.masked,
        repeats_keys=kept.repeats_keys,
        eager_attention=attention == "eager",
        logits_at_once=LOGITS_AT_ONCE if recipe.batch.fused_loss == "auto" and not recipe.compiles else None,
        parts=parts,
        dropout=bool(lora.get("lora_dropout")),
        dora=bool(lora.get("use_dora")),
        evaluated=evaluated,
        evaluated_length=evaluated_length,
    )


def _evaluation_batch(recipe: Recipe, plan: Plan, length: int, longest: int) -> tuple[int, int]:
    """Return rows and tokens of the evaluation's batches: in the data's order, padded to the longest row.

    Joined rows are a single one, each as long as those that are joined in a micro-batch of `length` tokens.
    """
    if not recipe.data.validation:
        return 0, 0
    rows = int(recipe.arguments.get("per_device_eval_batch_size", plan.per_device_train_batch_size))
    return (1, rows * length // plan.per_device_train_batch_size) if recipe.data.packing else (rows, longest)


def _quantization_bytes(recipe: Recipe, shape: ModelShape, compute: float) -> tuple[float, float]:
    """Return bytes per weight and bytes of constants per weight (bitsandbytes; Dettmers et al. 2023, section 3).

    Both are means over the layers, some of which the recipe may leave in the compute type.
    """
    given = recipe.quantization
    if given is None:
        return 0, 0
    if not given.get("load_in_4bit"):
        quantized, constants = 1.0, FLOAT32 / shape.hidden_size  # a float32 scale for each row of a weight
    elif given.get("bnb_4bit_use_double_quant"):
        quantized, constants = 0.5, 1 / QUANTIZED_BLOCK + FLOAT32 / QUANTIZED_BLOCK / CONSTANTS_BLOCK
    else:
        quantized, constants = 0.5, FLOAT32 / QUANTIZED_BLOCK
    skipped = skipped_share(shape, given.get("llm_int8_skip_modules") or [])
    return quantized * (1 - skipped) + compute * skipped, constants * (1 - skipped)


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
    what = "does not fit: it needs" if memory.needed > memory.gpu_bytes else "fits with little to spare: it needs"
    message = f"a process {what} {memory.needed / GIB:.1f} {gpu}"
    if "evaluation" in memory.planned.moment and "per_device_eval_batch_size" in recipe.arguments:
        key = "training.per_device_eval_batch_size"
        return [(f"{message}, for the evaluation", f"Set a smaller {key}", key)]
    fixes, key = [], "training.per_device_train_batch_size"
    rows = plan.per_device_train_batch_size
    if memory.largest_rows and memory.largest_rows < rows:
        fixes.append(f"{key}: {memory.largest_rows}")
    elif memory.largest_rows and rows > 1:
        fixes.append(f"a smaller {key}")
    if not memory.activation_checkpointing and memory.checkpointed.total < memory.kept.total:
        fixes.append("training.activation_checkpointing: true")
    fixes.append("a smaller data.max_length")
    return [(message, f"Set {', or '.join(fixes)}", key)]


def _fix_of_weights(recipe: Recipe) -> tuple[str, str]:
    """Return what makes the parts smaller that no batch changes, and the key it is about."""
    if recipe.lora is None:
        return "Add a lora section, with a quantization section if that is not enough, or take a larger GPU", "lora"
    if recipe.quantization is None:
        return "Add a quantization section, or take a larger GPU", "quantization"
    if not recipe.quantization.get("load_in_4bit"):
        return "Set load_in_4bit: true instead of 8 bits, or take a larger GPU", "quantization"
    return "Take a larger GPU, or a smaller model", "model.name_or_path"
