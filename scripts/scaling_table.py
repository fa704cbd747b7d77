"""Where more GPUs stop paying: time of the gradients' all-reduce against compute, from the plan of a recipe, on paper.

    python scripts/scaling_table.py recipes/qwen7b_qlora.yaml --gpu h100

Nothing is measured here. Compute is the operations of the model at 40 % of the GPU's rate (tunebook/plan/durations.py).
An all-reduce of G bytes over N processes in a ring moves 2 (N - 1) / N x G through each link, in 2 (N - 1) messages
(Patarasuk and Yuan 2009). It starts while the backward still computes; here it is added whole, which is the worst case.
"""

import argparse
import math
import sys
from dataclasses import dataclass

from tunebook.errors import EXIT_REFUSED, Problem, Refused
from tunebook.launching.world import world_of
from tunebook.model.shapes import find_shape
from tunebook.plan.durations import read_gpu, step_seconds_of
from tunebook.plan.memory import GIB
from tunebook.plan.memory_plan import plan_memory
from tunebook.plan.plan import build_plan
from tunebook.plan.storage import FLOAT32
from tunebook.recipe.reading import load_recipe

PROCESSES = (1, 8, 64, 512)
# Bytes per second through the slowest link of the ring, and seconds of one message.
LINKS = {"NVLink, 450 GB/s": (450e9, 5e-6), "InfiniBand, 50 GB/s": (50e9, 1e-5), "Ethernet, 3 GB/s": (3e9, 5e-5)}


@dataclass(frozen=True)
class Step:
    """One optimizer step on some processes: rows and seconds of compute of each, and bytes that are reduced."""

    processes: int
    rows: int
    compute: float
    gradient: int

    def reduce_seconds(self, bandwidth: float, latency: float) -> float:
        """Return the seconds of a ring all-reduce of the gradient."""
        others = self.processes - 1
        return 2 * others / self.processes * self.gradient / bandwidth + 2 * others * latency

    def efficiency(self, bandwidth: float, latency: float) -> float:
        """Return the part of the time in which the processes compute."""
        return self.compute / (self.compute + self.reduce_seconds(bandwidth, latency))


def batch_of(processes: int, rows: int) -> tuple[str, ...]:
    """Return the overrides that give each process `rows` rows, whatever the recipe says."""
    return (
        f"training.global_batch_size={processes * rows}",
        f"training.per_device_train_batch_size={math.gcd(rows, 8)}",
        "training.gradient_accumulation_steps=null",
    )


def plan_step(path: str, processes: int, rows: int, tokens: int, gpu: str) -> Step:
    """Return the step in which each process has `rows` rows of `tokens` tokens.

    Raises Refused, naming what is not known: the shape of the model, what is trained of it, or the rate of the GPU.
    """
    recipe, known = load_recipe(path, batch_of(processes, rows)), read_gpu(gpu)
    if tokens > recipe.data.max_length:
        longest = f"rows have at most {recipe.data.max_length:,} tokens, and --tokens-per-row is more"
        raise Refused(Problem(longest, "Give fewer", path, "data.max_length"))
    plan = build_plan(recipe, world_of(processes, "cuda"))
    shape = find_shape(recipe.model.name_or_path, recipe.model.revision)
    if shape is None:
        fix = "Give a model of facts/models.json, or a folder with its config.json"
        raise Refused(Problem(f"the shape of {recipe.model.name_or_path} is not known here", fix, path))
    if plan.trainable_parameters is None:
        why = plan.origins["trainable_parameters"]
        fix = "Take out what is not counted beforehand, such as use_dora"
        raise Refused(Problem(f"how many parameters are trained is not known: {why}", fix, path, "lora"))
    seconds = step_seconds_of(shape, plan, processes * rows * tokens, tokens, known)
    if seconds is None:
        raise Refused(Problem(f"the rate of {gpu!r} is not known", "Give a name, such as h100", "--gpu"))
    return Step(processes, rows, seconds, plan.trainable_parameters * FLOAT32)


def find_unfit(path: str, tokens: int, gpu: str) -> str | None:
    """Return what one row takes of a process of several where the GPU does not hold that, or None."""
    recipe, known = load_recipe(path, batch_of(8, 1)), read_gpu(gpu)
    plan, shape = build_plan(recipe, world_of(8, "cuda")), find_shape(recipe.model.name_or_path, recipe.model.revision)
    assert shape is not None, "the steps have been planned"
    memory = plan_memory(recipe, plan, shape, lambda _: (1, tokens), known.memory_gib, tokens)
    takes = f"one row of {tokens} tokens takes {memory.needed / GIB:.1f} GiB of each process"
    return None if memory.fits else f"note: {gpu} has {known.memory_gib:g} GiB, and {takes}"


def rows_of(path: str) -> int:
    """Return the rows of one optimizer step of a recipe; where it tells them by process, those of one process."""
    recipe = load_recipe(path)
    if recipe.batch.global_batch_size is not None:
        return recipe.batch.global_batch_size
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return math.prod(recipe.arguments.get(name) or 1 for name in names)


def render_table(steps: list[Step]) -> str:
    """Return the steps as a Markdown table."""
    head = ["GPUs", "rows of each", "compute", "bytes reduced", *(f"{name}: share of compute" for name in LINKS)]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for step in steps:
        compute, reduced = f"{1000 * step.compute:,.0f} ms", f"{step.gradient / 1e6:,.0f} MB"
        shares = (
            f"{1000 * step.reduce_seconds(*link):,.1f} ms: {step.efficiency(*link):.0%}" if step.processes > 1 else "-"
            for link in LINKS.values()
        )
        lines.append(" | ".join([str(step.processes), str(step.rows), compute, reduced, *shares]))
    return "\n".join(f"| {line} |" for line in lines)


def positive_number(text: str) -> int:
    """Return a number of tokens; argparse names the option where it is none."""
    if not (text.isascii() and text.isdecimal()) or (number := int(text[:9])) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} is no whole number from 1 on")
    return number


def main() -> None:
    """Print the table of a recipe twice: the global batch as it is, and as many rows for every process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--gpu", default="h100", help="a name of facts/gpus.json")
    parser.add_argument("--tokens-per-row", type=positive_number, default=128, help="105 in Alpaca's mean")
    given = parser.parse_args()
    try:
        rows = rows_of(given.recipe)
        each = max(1, rows // 8)
        dealt = [processes for processes in PROCESSES if rows % processes == 0]
        same = [plan_step(given.recipe, one, rows // one, given.tokens_per_row, given.gpu) for one in dealt]
        grown = [plan_step(given.recipe, one, each, given.tokens_per_row, given.gpu) for one in PROCESSES]
        unfit = find_unfit(given.recipe, given.tokens_per_row, given.gpu)
    except Refused as refused:
        print(refused, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from refused
    print(f"The global batch stays at {rows} rows, and the adapter the same:\n\n{render_table(same)}\n")
    print(f"Each process keeps {each} rows, and the global batch grows:\n\n{render_table(grown)}")
    if unfit:
        print(unfit, file=sys.stderr)


if __name__ == "__main__":
    main()
