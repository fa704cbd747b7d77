"""How fast instruction rows become labelled tokens: tunebook, the tokenizer's own batch encoding, and TRL.

python benchmarks/data_speed.py        (make bench-data)

Every measurement is a process of its own on the same rows. They take turns in rounds; what is promised is the median
of the ratios inside the rounds: a machine that is busy for a while is so for both sides of a ratio. TRL gets a virtual
environment of its own that sees this one's packages. It prepares in one process, its default; the tokenizer, and so
tunebook, uses all cores. The promise: at least 0.8 of raw `encode_batch`, and at least 2.5 times TRL's preparation, of
whichever form of rows it prepares faster. `encode_batch_fast`, which tunebook calls, leaves out the offsets of tokens;
its share is shown and not promised.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arguments import at_least, check_results
from machine import where_and_when
from result_files import write_json

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared"
TRL, TRL_FOLDER = "trl==1.16.0", HERE / ".trl"
MAX_LENGTH = 1024
LEAST_OF_RAW, LEAST_OF_TRL = 0.8, 2.5
RAW_BATCH_ROWS = 1000
PACKAGES = ("tokenizers", "datasets", "pyarrow")


class AnonymousPeak:
    """The most anonymous memory of this process while it runs, read ten times a second."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.first, self.peak = self._now(), 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return by how many bytes memory grew at most."""
        self._done.set()
        self._thread.join()
        return self.peak - self.first

    def _sample(self) -> None:
        while not self._done.wait(0.1):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds that `work` takes and the bytes that memory grew by."""
    memory, began = AnonymousPeak(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "grown_bytes": memory.stop()}


def measure_tunebook(rows: Path, tokenizer: Path) -> dict[str, float]:
    """Prepare the rows from the file to the cache: read, check, render, tokenise, label, split, write."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import load_tokenizer
    from tunebook.recipe.reading import load_recipe

    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "benchmark.yaml"
        model, data = "name_or_path: not/needed", f"path: {rows}, max_length: {MAX_LENGTH}"
        recipe.write_text(f"model: {{{model}}}\nlora: {{}}\ndata: {{{data}}}\ntraining: {{max_steps: 1}}\n")
        accepted, loaded = load_recipe(str(recipe), ()), load_tokenizer(str(tokenizer), None)
        os.environ["TUNEBOOK_CACHE"] = folder
        prepared: list[Any] = []
        found = timed(lambda: prepared.append(prepare_data(accepted, loaded)))
        assert prepared[0].num_rows == len(json.loads(rows.read_text(encoding="utf-8"))), "no row is left out"
        return {**found, "tokens": sum(prepared[0].train["length"])}


def measure_raw(rows: Path, tokenizer: Path, encode: str = "encode_batch") -> dict[str, float]:
    """Have the Rust tokenizer encode the rendered texts on all cores, and throw the result away."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    chats = [chat_of(row) for row in json.loads(rows.read_text(encoding="utf-8"))]
    texts = loaded.apply_chat_template(chats, tokenize=False)
    encode_batch = getattr(loaded.backend_tokenizer, encode)
    sizes: list[int] = []

    def work() -> None:
        for start in range(0, len(texts), RAW_BATCH_ROWS):
            encoded = encode_batch(texts[start : start + RAW_BATCH_ROWS], add_special_tokens=False)
            sizes.append(sum(len(one.ids) for one in encoded))

    return {**timed(work), "tokens": sum(sizes)}


def measure_raw_fast(rows: Path, tokenizer: Path) -> dict[str, float]:
    """Do as `measure_raw` without the offsets of each token."""
    return measure_raw(rows, tokenizer, "encode_batch_fast")


def measure_trl(rows: Path, tokenizer: Path, form: str) -> dict[str, float]:
    """Time what SFTTrainer does to the rows before training, in a process of TRL's environment."""
    command = [TRL_FOLDER / "bin" / "python", HERE / "trl_preparation.py", rows, tokenizer, str(MAX_LENGTH), form]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


MEASURES: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    "tunebook": measure_tunebook,
    "raw encode_batch": measure_raw,
    "raw encode_batch_fast": measure_raw_fast,
    "trl, prompt and completion": lambda rows, tokenizer: measure_trl(rows, tokenizer, "prompt_completion"),
    "trl, messages": lambda rows, tokenizer: measure_trl(rows, tokenizer, "messages"),
}


def chat_of(row: dict[str, str]) -> list[dict[str, str]]:
    """Return an Alpaca row as the two messages that tunebook makes of it."""
    question = f"{row['instruction']}\n\n{row['input']}" if row["input"].strip() else row["instruction"]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def install_trl() -> None:
    """Make TRL's environment beside this script, on top of the packages of this one."""
    packages = TRL_FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (packages / "trl").is_dir():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL_FOLDER)], check=True)
        pip = [str(TRL_FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", TRL], check=True)
    (packages / "benchmark.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")


def run_measure(name: str, rows: Path, tokenizer: Path) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--measure", name, "--rows", str(rows), "--tokenizer", str(tokenizer)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def write_rows(source: Path, num_rows: int, target: Path) -> Path:
    """Write the rows of `source`, a JSON list or JSON lines, again and again until there are so many."""
    text = source.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else json.loads(text)
    repeated = (rows * -(-num_rows // len(rows)))[:num_rows]
    target.write_text(json.dumps(repeated, ensure_ascii=False), encoding="utf-8")
    return target


def compare(source: Path, tokenizer: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    """Return all measurements and what they say of the promise."""
    origin = where_and_when(PACKAGES)
    origin["versions"]["trl"] = TRL.split("==")[1]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MEASURES}
    with TemporaryDirectory() as folder:
        rows = write_rows(source, num_rows, Path(folder) / "rows.json")
        for number in range(rounds):
            for name in MEASURES:
                found[name].append(run_measure(name, rows, tokenizer))
                print(f"round {number + 1}: {name}: {num_rows / found[name][-1]['seconds']:,.0f} rows/s", flush=True)
        quarter = run_measure("tunebook", write_rows(source, num_rows // 4, Path(folder) / "few.json"), tokenizer)
    rates = {name: num_rows / statistics.median(one["seconds"] for one in runs) for name, runs in found.items()}
    trl = max((name for name in MEASURES if name.startswith("trl")), key=lambda name: rates[name])
    return {
        **origin,
        "what": f"{source.name} repeated to {num_rows} rows, {tokenizer.name}, max_length {MAX_LENGTH}",
        "rows_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "of_raw_encode_batch": times_faster(found, "raw encode_batch"),
        "of_raw_encode_batch_fast": times_faster(found, "raw encode_batch_fast"),
        "times_trl": times_faster(found, trl),
        "promised": {"of_raw_encode_batch": LEAST_OF_RAW, "times_trl": LEAST_OF_TRL},
        "memory_grown_mib": {
            f"{num_rows // 4} rows": round(quarter["grown_bytes"] / 2**20),
            f"{num_rows} rows": round(max(one["grown_bytes"] for one in found["tunebook"]) / 2**20),
        },
        "measurements": found,
    }


def times_faster(found: dict[str, list[dict[str, float]]], other: str) -> float:
    """Return the median over the rounds of how many times faster tunebook was than `other` in the same round."""
    rounds = zip(found["tunebook"], found[other], strict=True)
    return round(statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in rounds), 3)


def check_files(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with what to type where rows or tokenizer are not there."""
    if missing := [str(path) for path in (given.rows, given.tokenizer) if not path.exists()]:
        said = "give --rows ROWS.json and --tokenizer FOLDER (to make as ARGS='...')"
        parser.error(f"{' and '.join(missing)} not found: {said}")


def main() -> None:
    """Measure one thing, or all and write the result; exit code 1 where the promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=SHARED / "data" / "alpaca_2000.json", help="a JSON list of rows")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "assets" / "qwen2.5-tokenizer")
    parser.add_argument("--num-rows", type=at_least(4), default=52_000)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "data_speed.json")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    check_files(parser, given)
    if given.measure:
        print(json.dumps(MEASURES[given.measure](given.rows, given.tokenizer)))
        return
    check_results(parser, "--results", given.results)
    install_trl()
    result = compare(given.rows, given.tokenizer, given.num_rows, given.rounds)
    write_json(given.results, result)
    print(json.dumps({name: value for name, value in result.items() if name != "measurements"}, indent=1))
    kept = result["of_raw_encode_batch"] >= LEAST_OF_RAW and result["times_trl"] >= LEAST_OF_TRL
    sys.exit(0 if kept else "the promise is not kept")


if __name__ == "__main__":
    main()
