"""What `data.packing` saves: the same steps padded and packed, each by finetune.py in a process of its own.

python benchmarks/packing_speed.py        (make bench-packing)

A Qwen2 of 4 layers, 256 wide, with random weights and sdpa, LoRA on all linear layers, on rows of the data set as they
come. Both ways take turns in rounds, every other one packed first; what counts is the median of the ratios inside them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arguments import at_least, check_results
from data_speed import SHARED, check_files, write_rows
from machine import where_and_when
from result_files import write_json

HERE = Path(__file__).resolve().parent
GLOBAL_BATCH, MICRO_BATCHES = 64, (4, 8, 16)
RECIPE = """
model: {{name_or_path: {base}, dtype: float32}}
lora: {{r: 8}}
data: {{path: {rows}, max_length: 512}}
training: {{global_batch_size: 64, num_train_epochs: 1, activation_checkpointing: false, save_strategy: no}}
"""


def build_base(tokenizer: Path, folder: Path, vocabulary: int = 0) -> Path:
    """Save the model with random weights, and the tokenizer beside it; a head of at least `vocabulary` tokens."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=max(len(loaded), vocabulary), **shape, **heads)).save_pretrained(folder)
    loaded.save_pretrained(folder)
    return folder


def run(recipe: Path, name: str, micro_batch: int, packing: bool) -> dict[str, float]:
    """Train to the end and return speed, padding, loss and memory."""
    words = [f"training.per_device_train_batch_size={micro_batch}", f"data.packing={str(packing).lower()}"]
    command = [sys.executable, str(HERE.parent / "finetune.py"), str(recipe), "--run-dir", name, *words]
    environ = {**os.environ, "TUNEBOOK_CACHE": str(recipe.parent / "cache")}
    ended = subprocess.run(command, cwd=recipe.parent, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    summary = json.loads((recipe.parent / name / "run_summary.json").read_text(encoding="utf-8"))
    return {
        "trained_tokens_per_second": round(summary["tokens_per_second"], 1),
        "padding": round(summary["padded_tokens"] / summary["processed_tokens"], 4),
        "final_loss": summary["final_loss"],
        "peak_memory_mib": round(summary["peak_memory_bytes"] / 2**20),
    }


def compare(recipe: Path, micro_batch: int, rounds: int) -> dict[str, Any]:
    """Return the medians of both ways by turns, and how many times faster packed rows were in the same round."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        for packing in (False, True) if number % 2 == 0 else (True, False):
            found[packing].append(run(recipe, f"{micro_batch}-{number}-{packing}", micro_batch, packing))
    padded, packed = ([one["trained_tokens_per_second"] for one in found[way]] for way in (False, True))
    ratios = [ours / theirs for ours, theirs in zip(packed, padded, strict=True)]
    return {
        "times_padded": round(statistics.median(ratios), 2),
        "least_to_most": [round(min(ratios), 2), round(max(ratios), 2)],
        "padded": medians(found[False]),
        "packed": medians(found[True]),
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over the runs."""
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def main() -> None:
    """Measure each micro-batch both ways and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer-mini")
    parser.add_argument("--num-rows", type=int, default=4 * GLOBAL_BATCH)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "packing_speed.json")
    given = parser.parse_args()
    check_files(parser, given)
    check_results(parser, "--results", given.results)
    found = where_and_when()
    found |= {"what": f"{given.num_rows} rows, global batch {GLOBAL_BATCH}", "rounds": given.rounds}
    with TemporaryDirectory() as folder:
        base = build_base(given.tokenizer, Path(folder) / "base")
        rows = write_rows(given.rows, given.num_rows, Path(folder) / "rows.json")
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE.format(base=base, rows=rows), encoding="utf-8")
        for micro_batch in MICRO_BATCHES:
            found[f"micro-batch {micro_batch}"] = compare(recipe, micro_batch, given.rounds)
            print(f"micro-batch {micro_batch}: {json.dumps(found[f'micro-batch {micro_batch}'])}", flush=True)
    write_json(given.results, found)


if __name__ == "__main__":
    main()
