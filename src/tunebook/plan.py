"""The plan: what this run will do, everything derived, nothing optional."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What one run will do. Rows and what follows from them are None until they are known."""

    model: str
    model_revision: str | None
    compute_dtype: str  # "float32", "bfloat16" or "float16"
    method: str  # "QLoRA", "LoRA" or "full fine-tune"
    world_size: int
    device_type: str
    backend: str | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    learning_rate: float
    num_train_epochs: float
    max_length: int
    seed: int
    run_dir: str
    num_train_rows: int | None = None
    num_eval_rows: int | None = None
    steps_per_epoch: int | None = None
    num_optimizer_steps: int | None = None
