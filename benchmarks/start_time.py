"""From launch to the first optimizer step, against the imports that any such program needs and the load of the model.

python benchmarks/start_time.py        (make bench-start)

The tiny recipe on one process, its data prepared before, nothing held out. The other side is a script that imports
Trainer, peft and datasets, loads base and adapter and says that it is ready. Both clocks stop there: what Python and
torch take to end counts on neither side. By turns, each in a new process; a broken recipe as well.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from arguments import at_least, check_results
from machine import where_and_when
from result_files import write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MOST_OF_IMPORTS, MOST_SECONDS_BROKEN = 1.15, 1.0
REFUSED = 2  # exit code of finetune.py
LINES_TOLD = 20  # of what a program said that failed
# One row, so that it is the start that is timed and not the work of a step.
ONE_ROW = ("training.global_batch_size=1", "training.per_device_train_batch_size=1")
STEP = ("training.max_steps=1", "training.num_train_epochs=null", "training.logging_steps=1", *ONE_ROW)
NOTHING_ELSE = ("data.validation=0", "data.answer_rows=0", "training.save_strategy=no", "training.eval_strategy=no")
IMPORTS = """
from transformers import Trainer, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
import peft, datasets, torch
tokenizer = AutoTokenizer.from_pretrained("assets/tiny-qwen2")
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
base = AutoModelForCausalLM.from_pretrained(
    "assets/tiny-qwen2", dtype=torch.float32, quantization_config=four_bits, device_map={"": "cpu"}
)
peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
print("ready", flush=True)
"""


def environment(cache: Path) -> dict[str, str]:
    """Return what both sides run under. Python keeps what it compiled, as it does where nobody tells it not to."""
    told = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**told, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TUNEBOOK_CACHE": str(cache)}


def seconds_to_first_step(place: Path, number: int) -> float:
    """Return the seconds from the launch to the line of step 1 in metrics.jsonl."""
    folder = place / f"run-{number}"
    command = [sys.executable, "finetune.py", "recipes/tiny_qlora.yaml", "--run-dir", str(folder), *STEP, *NOTHING_ELSE]
    return seconds_to_line(command, folder / "metrics.jsonl", environment(place / "cache"))


def seconds_to_line(command: list[str], file: Path, environ: dict[str, str]) -> float:
    """Return the seconds from the launch of a command to the first whole line of a file, after the command's end.

    Ends with what it said last where it ends without a line, or in an error.
    """
    with TemporaryFile() as said:
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=subprocess.STDOUT) as process:
            seconds, ended = None, False
            # Once more after the end: the line may have come between the last look at the file and that.
            while seconds is None and not ended:
                ended = process.poll() is not None
                if file.exists() and b"\n" in file.read_bytes():
                    seconds = time.perf_counter() - began
                else:
                    time.sleep(0.005)
        if seconds is None or process.returncode:
            said.seek(0)
            tail = said.read().decode(errors="replace").strip().splitlines()[-LINES_TOLD:]
            line = "" if seconds is not None else f" without a line in {file.name}"
            raise SystemExit("\n".join([f"{shlex.join(command)} ended with {process.returncode}{line}:", *tail]))
    return seconds


def seconds_to_ready(place: Path, script: str) -> float:
    """Return the seconds from the launch of a script to its line `ready`."""
    command = [sys.executable, "-c", script]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment(place / "cache"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "it is a pipe"
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
    if line != b"ready\n" or process.returncode:
        raise SystemExit(f"the script ended with {process.returncode}, and said {line!r}")
    return seconds


def seconds_to_refusal(place: Path, command: list[str]) -> float:
    """Return the seconds from the launch to the end of a command that refuses its recipe."""
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=ROOT, env=environment(place / "cache"), capture_output=True, check=False)
    if ended.returncode != REFUSED:
        raise SystemExit(ended.stderr.decode())
    return time.perf_counter() - began


def compare(rounds: int) -> dict[str, Any]:
    """Return the seconds of both sides by turns, and of the plan of a broken recipe."""
    origin = where_and_when()
    broken = [sys.executable, "finetune.py", "recipes/tiny_qlora.yaml", "--plan", "training.learning_rte=1"]
    found: dict[str, list[float]] = {"first step": [], "imports and load": [], "plan of a broken recipe": []}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        seconds_to_first_step(place, 0)  # prepares the data
        for number in range(1, rounds + 1):
            found["first step"].append(seconds_to_first_step(place, number))
            found["imports and load"].append(seconds_to_ready(place, IMPORTS))
            found["plan of a broken recipe"].append(seconds_to_refusal(place, broken))
            print({name: round(seconds[-1], 2) for name, seconds in found.items()}, flush=True)
    pairs = zip(found["first step"], found["imports and load"], strict=True)
    return {
        **origin,
        "times_imports_and_load": round(statistics.median(ours / theirs for ours, theirs in pairs), 3),
        "promised": {"times_imports_and_load": MOST_OF_IMPORTS, "plan of a broken recipe": MOST_SECONDS_BROKEN},
        "seconds": {name: round(statistics.median(seconds), 3) for name, seconds in found.items()},
        "spread": {name: [round(min(seconds), 3), round(max(seconds), 3)] for name, seconds in found.items()},
    }


def main() -> None:
    """Measure and write the result; exit code 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "start_time.json")
    given = parser.parse_args()
    check_results(parser, "--results", given.results)
    found = compare(given.rounds)
    write_json(given.results, found)
    print(json.dumps(found, indent=1))
    kept = found["times_imports_and_load"] <= MOST_OF_IMPORTS
    sys.exit(not (kept and found["seconds"]["plan of a broken recipe"] < MOST_SECONDS_BROKEN))


if __name__ == "__main__":
    main()
