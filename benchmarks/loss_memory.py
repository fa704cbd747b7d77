"""Seconds and memory of the loss of a large vocabulary: all logits at once, where labels count, and in pieces.

python benchmarks/loss_memory.py        (make bench-loss)

One layer of a Qwen2, 256 wide, with Qwen2.5's vocabulary of 152,064 tokens and LoRA on it; its head is frozen. A
forward and a backward pass of one micro-batch, each in a process of its own, the ways by turns. Memory is the highest
RssAnon above that before the pass.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arguments import at_least, check_results
from data_speed import AnonymousPeak
from machine import where_and_when
from result_files import write_json

HERE = Path(__file__).resolve().parent
VOCABULARY, WIDTH, ROWS, LENGTH = 152_064, 256, 4, 1024
# transformers' own loss; the head for labels only (fused_loss: off); and that in pieces (auto).
WAYS = ("plain", "labels", "pieces")


def build_model() -> Any:
    """Return the model with random weights and adapters; the same in each process."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 704, "num_hidden_layers": 1, "num_attention_heads": 8}
    base = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))
    return get_peft_model(
        base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )


def build_micro_batch(trained_share: float) -> dict[str, Any]:
    """Return rows of random tokens, of which the last part is trained."""
    import torch

    from tunebook.training.batches import pad_right

    generator = torch.Generator().manual_seed(0)
    prompt = round(LENGTH * (1 - trained_share))
    rows = [torch.randint(VOCABULARY, (LENGTH,), generator=generator).tolist() for _ in range(ROWS)]
    return pad_right([{"input_ids": row, "labels": [-100] * prompt + row[prompt:]} for row in rows])


def measure(way: str, trained_share: float) -> dict[str, Any]:
    """Run one forward and backward pass and return its seconds, its MiB, the loss and the adapter's gradient."""
    import torch

    from tunebook.training.batches import tensors_of
    from tunebook.training.head_loss import HeadLoss

    model, batch = build_model(), build_micro_batch(trained_share)
    number = torch.tensor(batch["num_trained_tokens"])
    head_loss = HeadLoss(model, "float32", in_pieces=way == "pieces")
    peak, began = AnonymousPeak(), time.perf_counter()
    if way == "plain":
        loss = model(**tensors_of(batch), use_cache=False, num_items_in_batch=number).loss
    else:
        loss = head_loss.sums(model, tensors_of(batch), batch["targets"]).loss / number
    loss.backward()
    seconds, mib = time.perf_counter() - began, peak.stop() / 2**20
    gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    return {"seconds": seconds, "mib": mib, "loss": loss.item(), "gradient": gradient.tolist()}


def run_measure(way: str, trained_share: float) -> dict[str, Any]:
    """Measure in a process of its own: what one pass leaves in the allocator is not the next one's."""
    command = [sys.executable, str(HERE / "loss_memory.py"), "--measure", way, "--trained-share", str(trained_share)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def compare(trained_share: float, rounds: int) -> dict[str, Any]:
    """Return medians of all ways, by turns, and how they stand to the plain one."""
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            measured[way].append(run_measure(way, trained_share))
    plain = measured["plain"][0]
    if not all(math.isfinite(number) for runs in measured.values() for number in runs[0]["gradient"]):
        raise SystemExit("a gradient is not finite")
    largest = max(map(abs, plain["gradient"]))
    found = {}
    for way, runs in measured.items():
        seconds = [run["seconds"] for run in runs]
        pairs = zip(runs[0]["gradient"], plain["gradient"], strict=True)
        found[way] = {
            "seconds": round(statistics.median(seconds), 2),
            "spread": [round(min(seconds), 2), round(max(seconds), 2)],
            "mib": round(statistics.median(run["mib"] for run in runs)),
            "loss": runs[0]["loss"],
            "gradient_off_by": max(abs(one - other) for one, other in pairs) / largest,
        }
    for one in found.values():
        one["times_plain"] = round(one["seconds"] / found["plain"]["seconds"], 3)
        one["memory_of_plain"] = round(one["mib"] / found["plain"]["mib"], 3)
    return found


def main() -> None:
    """Measure with all tokens trained and with 40 % of them, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "loss_memory.json")
    parser.add_argument("--measure", choices=WAYS, help="one pass, as JSON; used by the benchmark itself")
    parser.add_argument("--trained-share", type=float, default=1.0)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.trained_share)))
        return
    check_results(parser, "--results", given.results)
    where = where_and_when()
    found = {f"{share:.0%} of tokens trained": compare(share, given.rounds) for share in (1.0, 0.4)}
    what = (
        f"{ROWS} x {LENGTH} tokens, {WIDTH} wide, vocabulary {VOCABULARY}, float32, one thread, {given.rounds} rounds"
    )
    write_json(given.results, {"what": what, **found, **where})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
