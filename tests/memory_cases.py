"""Peak memory of real training on the CPU: `python memory_cases.py FOLDER [CASE...]` prints bytes by case.

Each case trains in a process of its own, forked off one that has imported everything and trained a trivial model, so
that what the libraries themselves hold is in the number that is subtracted.
"""

import ctypes
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiny_training import NF4, STOP, TinyData, build_base, build_recipe, plan_of
from tunebook.launching.process_group import start_process_group
from tunebook.launching.world import World

SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class Case:
    """One run: the shape of its model, how it is trained, and its micro-batches (all rows have `length` tokens).

    Logits in pieces are fewer at once than in real runs, so that small models have several. `evaluated` is the number
    of rows that are held out and measured at the end.
    """

    shape: dict[str, Any]
    rows: int
    length: int
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)
    logits_at_once: int = 2**21
    evaluated: int = 0

    def recipe(self, base: Path | str) -> Any:
        """Return the recipe of the case on a base folder."""
        return build_recipe(
            base,
            lora=self.lora,
            quantization=self.quantization,
            global_batch_size=None,
            validation=0.5 if self.evaluated else 0,
            per_device_train_batch_size=self.rows,
            num_train_epochs=1,
            **self.arguments,
        )


TRIVIAL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 258}
# Large enough against the noise of an allocator (some MB), small enough for seconds on one core.
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 4, "vocab_size": 16384, "max_position_embeddings": 1024}
DEEP = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
DEEP |= {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024}
# Logits are most of what it needs.
WORDY = {**DEEP, "num_hidden_layers": 2, "vocab_size": 32768}
NARROW, TIED = {"hidden_size": 64, "intermediate_size": 256}, {"tie_word_embeddings": True}
FEW = {"num_hidden_layers": 2}
R16 = {"r": 16, "lora_alpha": 16}
OFF, ON = {"activation_checkpointing": False}, {"activation_checkpointing": True}
ALL_LOGITS = {"batch": {"fused_loss": "off"}}
PACKED, EAGER = {"packing": True}, {"model": {"attn_implementation": "eager"}}
CASES = {
    "qlora": Case(WIDE, 4, 256, R16, NF4, arguments=ON),
    "qlora, activations kept": Case(WIDE, 4, 256, R16, NF4, arguments=OFF),
    "lora": Case(WIDE, 2, 512, R16, arguments=ON),
    "lora, activations kept": Case(DEEP, 4, 256, R16, arguments=OFF),
    "full": Case(WIDE, 1, 256, arguments=ON),
    "full, accumulated": Case(WIDE, 2, 256, arguments=ON | {"gradient_accumulation_steps": 2}),
    "full, activations kept": Case(DEEP, 4, 256, arguments=OFF),
    "lora, logits in pieces": Case(WORDY, 4, 256, R16, arguments=ON),
    "lora, all logits": Case(WORDY, 4, 256, R16, arguments=ON | ALL_LOGITS),
    "lora, padded, activations kept": Case(WIDE, 4, 256, R16, arguments=OFF),
    "lora, packed": Case(WIDE, 4, 256, R16, arguments=ON | PACKED),
    "lora, packed, activations kept": Case(WIDE, 4, 256, R16, arguments=OFF | PACKED),
    "lora, eager": Case(WIDE, 4, 256, R16, arguments=ON | EAGER),
    "lora, eager, activations kept, one row": Case(WIDE, 1, 512, R16, arguments=OFF | EAGER),
    "head trained whole": Case(WORDY, 1, 64, R16 | {"modules_to_save": ["lm_head"]}, arguments=ON),
    "head trained whole, in pieces": Case(WORDY, 2, 256, R16 | {"modules_to_save": ["lm_head"]}, arguments=ON),
    "embedding and layers trained whole": Case(
        WIDE, 2, 256, R16 | {"modules_to_save": ["embed_tokens", "down_proj"]}, arguments=ON
    ),
    "dropout": Case(DEEP, 4, 256, R16 | {"lora_dropout": 0.05}, arguments=OFF),
    "dropout, qlora": Case(WIDE, 4, 256, R16 | {"lora_dropout": 0.05}, NF4, arguments=OFF),
    "full, adafactor": Case(WIDE, 1, 128, arguments=ON | {"optim": "adafactor"}),
    "full, adamw_torch": Case(WIDE, 1, 128, arguments=ON | {"optim": "adamw_torch"}),
    "rows of tokens": Case(WORDY, 4, 256, R16 | {"trainable_token_indices": [7]}, arguments=ON),
    "rows of tokens, tied": Case(WORDY | TIED, 4, 256, R16 | {"trainable_token_indices": [7]}, arguments=ON),
    "dora": Case(WIDE, 2, 256, R16 | {"use_dora": True}, arguments=ON),
    "dora, qlora, activations kept": Case(WIDE | FEW, 4, 256, R16 | {"use_dora": True}, NF4, arguments=OFF),
    "dora, qlora, dropout, activations kept": Case(
        WIDE | FEW, 2, 128, R16 | {"use_dora": True, "lora_dropout": 0.05}, NF4, arguments=OFF
    ),
    "qlora, layers left unquantised": Case(
        WIDE, 2, 256, R16, NF4 | {"llm_int8_skip_modules": ["down_proj", "up_proj"]}, arguments=ON
    ),
    "all logits, smoothed": Case(WORDY, 4, 256, R16, arguments=ON | ALL_LOGITS | {"label_smoothing_factor": 0.1}),
    "evaluation": Case(WIDE | FEW, 1, 256, R16, NF4, arguments=ON | {"per_device_eval_batch_size": 16}, evaluated=16),
    "evaluation, full, all logits": Case(
        WIDE | FEW, 1, 64, arguments=ON | ALL_LOGITS | {"per_device_eval_batch_size": 32}, evaluated=32
    ),
    # In bfloat16, which most CPUs compute slowly: of fewer tokens and layers.
    "lora, bfloat16, logits in pieces": Case(WORDY | NARROW, 4, 256, R16, None, "bfloat16", ON),
    "qlora, bfloat16": Case(WIDE | FEW, 2, 128, R16, NF4, "bfloat16", ON),
    "lora, bfloat16, activations kept": Case(DEEP, 1, 256, R16, None, "bfloat16", OFF),
    "full, bfloat16": Case(WIDE | FEW, 1, 64, None, None, "bfloat16", ON),
    "qlora, bfloat16, packed, activations kept": Case(WIDE | FEW, 2, 128, R16, NF4, "bfloat16", OFF | PACKED),
    "qlora, bfloat16, dora": Case(WIDE | FEW, 2, 128, R16 | {"use_dora": True}, NF4, "bfloat16", OFF),
    "qlora, bfloat16, embedding trained whole": Case(
        WIDE | FEW, 2, 128, R16 | {"modules_to_save": ["embed_tokens"]}, NF4, "bfloat16", OFF
    ),
}


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    start_process_group(World())
    train(folder / "trivial", Case(TRIVIAL, 2, 8, R16, NF4))
    train(folder / "trivial", Case(TRIVIAL, 2, 8))
    print(json.dumps({name: measured(folder / str(number), CASES[name]) for number, name in enumerate(names)}))


def measured(folder: Path, case: Case) -> int:
    """Return the most bytes that a case held beyond what this process held when it was forked."""
    base(folder, case)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = anonymous_bytes()
        peak = Peak()
        train(folder, case)
        os.write(writing, str(peak.stop() - before).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


class Peak:
    """The largest RssAnon of this process from its making to `stop`, looked at every 2 ms."""

    def __init__(self) -> None:
        self._peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _look(self) -> None:
        while not self._done.is_set():
            self._peak = max(self._peak, anonymous_bytes())
            time.sleep(SAMPLE_SECONDS)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def base(folder: Path, case: Case) -> Path:
    """Save the base; in the other 16- or 32-bit type, so that loading it makes a copy instead of mapping the file."""
    import torch
    from safetensors.torch import load_file, save_file

    made = build_base(folder / "base", **case.shape)
    weights = load_file(made / "model.safetensors")
    held = torch.float16 if case.dtype == "float32" else torch.float32
    save_file({name: tensor.to(held) for name, tensor in weights.items()}, made / "model.safetensors", {"format": "pt"})
    return made


def train(folder: Path, case: Case, steps: int = 2) -> None:
    """Train `steps` steps (the optimizer has its states from the second on), without answers and saving."""
    from accelerate.state import AcceleratorState
    from transformers import AutoTokenizer

    from tunebook.training import head_loss
    from tunebook.training.ready import build_run
    from tunebook.training.run import build_trainer

    head_loss.LOGITS_AT_ONCE = case.logits_at_once
    AcceleratorState._reset_state()
    if not (folder / "base").exists():
        base(folder, case)
    accumulation = case.arguments.get("gradient_accumulation_steps", 1)
    data = nearly_same_rows(case.rows * accumulation * steps, case.length, case.evaluated)
    recipe = case.recipe(folder / "base")
    plan = replace(plan_of(recipe, World(), data, folder / "run"), compute_dtype=case.dtype)
    run = build_run(recipe, plan, World(), AutoTokenizer.from_pretrained(folder / "base"), data)
    trainer = build_trainer(run, None)
    trainer.train()
    trainer.held_out_loss()


def nearly_same_rows(number: int, length: int, held_out: int) -> TinyData:
    """Return rows of which every other one is a token shorter, so that some are padded; all tokens are trained.

    A plan without data cannot know how many are, and takes all.
    """
    import datasets

    rows = [
        {"input_ids": [40] * size, "labels": [STOP] * size, "length": size}
        for size in (length - index % 2 for index in range(number + held_out))
    ]
    train, evaluation = (datasets.Dataset.from_list(part) for part in (rows[:number], rows[number:]))
    return TinyData(train, evaluation if held_out else None, ())


if __name__ == "__main__":
    main()
