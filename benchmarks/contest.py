"""What every contestant trains, the command of each, and one run of one of them.

A contest is a model, rows, a batch and a method. Model and labelled rows are made once, by tunebook; every contestant
gets the same files, the same optimizer at the same constant rate, float32, and two processes over gloo.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_speed import write_rows
from larger_model import build_base
from peers import python_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NUM_PROCESSES = 2
RATE, RANK, ALPHA = 1e-3, 8, 16
RECIPE = """
model: {{name_or_path: "{base}", dtype: float32}}
{quantization}
lora: {{r: {rank}, lora_alpha: {alpha}}}
data: {{path: "{rows}", format: alpaca, max_length: 1024, validation: 0, answer_rows: 0}}
training: {{global_batch_size: {global_batch}, per_device_train_batch_size: {micro_batch}, num_train_epochs: {epochs},
  learning_rate: {rate}, lr_scheduler_type: constant, activation_checkpointing: false, save_strategy: no}}
"""
NF4 = "quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}"
LARGER_VOCABULARY = 8192
SECONDS_TO_LEAVE = 30.0


@dataclass(frozen=True)
class Size:
    """A model and rows; without a tokenizer the model is one that lies there whole.

    Where steps are short more of them are taken, `times_the_steps`, so that a run is timed over seconds.
    """

    model: Path
    rows: Path
    global_batch: int
    micro_batch: int
    tokenizer: Path | None = None
    times_the_steps: int = 1


@dataclass(frozen=True)
class Contest:
    """Files of one size and method, of so many steps an epoch; `folder` holds what runs leave."""

    name: str
    folder: Path
    recipe: Path
    base: Path
    rows: Path
    tokenised: Path
    num_labels: int
    nf4: bool
    size: Size
    steps: int  # of an epoch
    epochs: int
    words: tuple[str, ...] = ()  # for finetune.py, beside the recipe

    @property
    def accumulation(self) -> int:
        """Micro-batches of one process in a step."""
        return self.size.global_batch // self.size.micro_batch // NUM_PROCESSES


@dataclass
class Run:
    """What a run of a contestant came to; `error` where it failed. `labels` and `seconds` are after the first step.

    `trains`, `gradient_norm` and `moved` are those of clock.py's StepClock.
    """

    labels: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    whole_seconds: float = 0.0
    load_average: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    trains: dict[str, Any] = field(default_factory=dict)
    gradient_norm: float = 0.0
    moved: float = 0.0
    error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second, over all processes."""
        return self.labels / self.seconds


def make_contest(name: str, size: Size, steps: int, epochs: int, folder: Path) -> Contest:
    """Write model, rows and labelled rows; `steps` are those of an epoch, and `name` ends in LoRA or QLoRA."""
    nf4 = name.endswith("QLoRA")
    folder.mkdir(parents=True)
    base = folder.parent / f"base-{name.split(',', maxsplit=1)[0]}"
    if not base.exists():
        base = build_base(size.tokenizer, base, LARGER_VOCABULARY) if size.tokenizer else size.model.resolve()
    rows = write_rows(size.rows, steps * size.global_batch, folder / "rows.json")
    recipe = folder / "recipe.yaml"
    numbers = {"rate": RATE, "rank": RANK, "alpha": ALPHA, "epochs": epochs, "global_batch": size.global_batch}
    files = {"base": base, "rows": rows, "quantization": NF4 if nf4 else "", "micro_batch": size.micro_batch}
    recipe.write_text(RECIPE.format(**numbers, **files), encoding="utf-8")
    contest = (name, folder, recipe, base, rows, folder / "tokenised")
    command = [sys.executable, str(HERE / "labelled_rows.py"), str(recipe), str(contest[-1])]
    environ = {**os.environ, **surroundings(folder)}
    labels = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    if labels.returncode:
        raise SystemExit(labels.stderr)
    return Contest(*contest, num_labels=int(labels.stdout.split()[-1]), nf4=nf4, size=size, steps=steps, epochs=epochs)


def surroundings(folder: Path) -> dict[str, str]:
    """Return the variables that every contestant runs under: one thread, no GPU, no network."""
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TUNEBOOK_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": str(ROOT / "src"),
    }


def finetune(contest: Contest, out: Path) -> list[str]:
    """Return how finetune.py is run."""
    return [sys.executable, str(ROOT / "finetune.py"), str(contest.recipe), "--run-dir", str(out), *contest.words]


def by_hand(contest: Contest, out: Path) -> list[str]:
    """Return how train_ddp.py is run."""
    return [sys.executable, str(ROOT / "train_ddp.py"), str(contest.recipe), "--run-dir", str(out)]


def trl_sft(contest: Contest, out: Path) -> list[str]:
    """Return how `trl sft` is run: its defaults, but for what all contestants share."""
    given = {
        "model_name_or_path": contest.base,
        "dataset_name": contest.tokenised,
        "output_dir": out,
        "per_device_train_batch_size": contest.size.micro_batch,
        "gradient_accumulation_steps": contest.accumulation,
        "num_train_epochs": contest.epochs,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "dtype": "float32",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "max_length": 1024,
        "logging_first_step": True,
    }
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    nf4 = ["--load_in_4bit", "--bnb_4bit_quant_type", "nf4", "--use_bnb_nested_quant"] if contest.nf4 else []
    return [str(python_of("trl")), "-m", "trl.scripts.sft", *words, "--use_peft", *nf4]


def trl_rebalanced(contest: Contest, out: Path) -> list[str]:
    """Return how `trl sft`, which is SFTTrainer, is run with the sampler that tunebook's is made from."""
    return [*trl_sft(contest, out), "--train_sampling_strategy", "batch_rebalance"]


def lightning(contest: Contest, out: Path) -> list[str]:
    """Return how the loop by Lightning is run."""
    settings = {
        "base": str(contest.base),
        "rows": str(contest.tokenised / "train.parquet"),
        "nf4": contest.nf4,
        "r": RANK,
        "alpha": ALPHA,
        "learning_rate": RATE,
        "epochs": contest.epochs,
        "micro_batch": contest.size.micro_batch,
        "accumulation": contest.accumulation,
    }
    return [str(python_of("lightning")), str(HERE / "lightning_loop.py"), json.dumps(settings)]


def llamafactory(contest: Contest, out: Path) -> list[str]:
    """Return how LLaMA-Factory is run, on rows that are labelled already."""
    given = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(contest.base),
        "tokenized_path": str(contest.tokenised / "saved"),
        "dataset": "none",
        "template": "empty",
        "finetuning_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_target": "all",
        "output_dir": str(out),
        "per_device_train_batch_size": contest.size.micro_batch,
        "gradient_accumulation_steps": contest.accumulation,
        "num_train_epochs": contest.epochs,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "infer_dtype": "float32",
        "use_cpu": True,
        "disable_gradient_checkpointing": True,
        "logging_steps": 10,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "ddp_find_unused_parameters": False,
    }
    given |= {"quantization_bit": 4, "quantization_method": "bnb"} if contest.nf4 else {}
    settings = contest.folder / f"{out.name}.yaml"
    settings.write_text(json.dumps(given, indent=1), encoding="utf-8")
    return [str(python_of("llamafactory")), "-m", "llamafactory.launcher", str(settings)]


OURS, BY_HAND = "finetune.py", "train_ddp.py"
TRL, TRL_REBALANCED, LIGHTNING = "trl sft", "SFTTrainer, batch_rebalance", "Lightning, DDP"
CONTESTANTS: dict[str, Callable[[Contest, Path], list[str]]] = {
    OURS: finetune,
    BY_HAND: by_hand,
    TRL: trl_sft,
    TRL_REBALANCED: trl_rebalanced,
    LIGHTNING: lightning,
    "LLaMA-Factory": llamafactory,
}
NEEDS = {TRL: "trl", TRL_REBALANCED: "trl", LIGHTNING: "lightning", "LLaMA-Factory": "llamafactory"}


def launched(command: list[str], out: Path, num_processes: int = NUM_PROCESSES) -> list[str]:
    """Return a contestant's command as so many processes with the clock."""
    python, *target = command
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    return [*torchrun, str(HERE / "clock.py"), str(out), *target]


def run_contestant(name: str, contest: Contest, label: str, limit: float, num_processes: int = NUM_PROCESSES) -> Run:
    """Run one contestant to its end in at most `limit` seconds; a failure is told, not raised."""
    out = contest.folder / f"{label}-{''.join(letter for letter in name if letter.isalnum())}"
    command = launched(CONTESTANTS[name](contest, out), out, num_processes)
    environ = {**os.environ, **surroundings(contest.folder)}
    load, began = os.getloadavg()[0], time.perf_counter()
    files = [out.with_name(f"{out.name}-rank{rank}.json") for rank in range(num_processes)]
    with (out.parent / f"{out.name}.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=environ, cwd=contest.folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, files, limit)
        finally:
            process.terminate()  # torchrun ends its processes; one that is over hears nothing
            process.wait()
        if not all(file.is_file() for file in files):
            log.seek(0)
            late = f"not done after {limit:.0f} s" if time.perf_counter() - began > limit else None
            return Run(error=late or _last_error(log.read()))
    seen = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    first = seen[0]["first_labels"] if seen[0]["counts_all"] else sum(one["first_labels"] for one in seen)
    ends = seen[0]["ends"]
    if len(ends) != (steps := contest.steps * contest.epochs):
        return Run(error=f"took {len(ends)} optimizer steps, where the rows make {steps}: not the same training")
    return Run(
        labels=contest.num_labels * contest.epochs - first,
        seconds=max(one["ends"][-1] - one["ends"][0] for one in seen),
        losses=seen[0]["losses"],
        step_seconds=[round(after - before, 4) for before, after in pairwise(ends)],
        whole_seconds=round(time.perf_counter() - began, 1),
        load_average=round(load, 2),
        **{name: seen[0][name] for name in ("versions", "trains", "gradient_norm", "moved")},
    )


def _wait(process: subprocess.Popen[bytes], files: list[Path], limit: float) -> None:
    """Wait for the end of a process: for `limit` seconds, and once its files are there for a little."""
    began = time.perf_counter()
    while process.poll() is None and time.perf_counter() - began < limit:
        time.sleep(0.1)
        if all(file.is_file() for file in files):
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_LEAVE)
            return


def _last_error(log: str) -> str:
    """Return the line of a log that says what went wrong, before torchrun's own account of it."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return lines[-1][:300] if lines else log.strip()[-300:]
