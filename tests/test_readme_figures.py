"""The figures of README.md are those of benchmarks/results, and its promises those that the benchmarks hold to.

A figure is compared at as many digits as README shows. What differs is named, with what the file says.
"""

import json
import re
import sys

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import data_speed
import start_time
from contest import BY_HAND, TRL, TRL_REBALANCED
from results_table import AT_THE_LARGER_SIZE, EVERYWHERE

RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())
CONTESTANTS = {
    "the hand-written loop, `train_ddp.py`": BY_HAND,
    "Lightning 2.6, DDP": "Lightning, DDP",
    "LLaMA-Factory 0.9.5 (its own transformers 5.6, peft 0.18)": "LLaMA-Factory",
    "TRL 1.16, `SFTTrainer` with batch_rebalance": TRL_REBALANCED,
    "TRL 1.16, `trl sft`": TRL,
}


def newest_contests():
    return max(RESULTS.glob("????-??-??.json"))


def result_of(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("place", sorted(RESULTS.glob("*.json")), ids=lambda place: place.name)
def test_results_say_when_they_were_measured_and_of_which_commit_and_by_which_command(place):
    found = result_of(place.name)
    assert all(found.get(name) for name in ("date", "command", "commit", "machine", "versions")), place.name


def table_rows():
    """Return the cells of all rows of all tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"]


def cells_of(beginning):
    """Return the one row whose first cell begins so."""
    [cells] = [cells for cells in table_rows() if cells[0].startswith(beginning)]
    return cells


def figures_in(text):
    return re.findall(r"\d+(?:\.\d+)?", text)


def check(what, file, shown, values):
    """Say each figure that is not the value of the file, rounded to the digits that are shown."""
    assert len(shown) == len(values), f"{what}: README shows {shown}, {file} holds {values}"
    rounded = [f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(shown, values, strict=True)]
    assert shown == rounded, f"{what}: README says {', '.join(shown)}, {file} {', '.join(rounded)}"


def test_the_ratios_are_those_of_the_newest_contests():
    file, apart = newest_contests(), []
    contests = json.loads(file.read_text(encoding="utf-8"))["contests"]
    head = cells_of("against")[1:]
    assert set(head) == set(contests), f"README's table is of {head}, {file.name} of {list(contests)}"
    measured = {name for one in contests.values() for name in one["ratios"] if "ratio" in one["ratios"][name]}
    assert measured == set(CONTESTANTS.values()), f"{file.name} holds {sorted(measured)}"
    for row, name in CONTESTANTS.items():
        for contest, shown in zip(head, cells_of(row)[1:], strict=True):
            ratio = contests[contest]["ratios"].get(name, {}).get("ratio")
            said = f"{ratio['median']:.{len(shown.partition('.')[2])}f}" if ratio else "nothing"
            apart += [f"{contest}, {name}: README says {shown}, {file.name} {said}"] if shown != said else []
    assert not apart, "\n".join(apart)
    assert f"(benchmarks/results/{file.stem}.md)" in README, f"README links other results than {file.stem}.md"


def test_what_is_promised_of_the_ratios():
    [shown] = re.findall(
        r"Promised are ([\d.]+) of the hand-written loop, ([\d.]+) times `trl sft` and ([\d.]+) times `SFTTrainer`",
        TEXT,
    )
    promised = [EVERYWHERE[BY_HAND], AT_THE_LARGER_SIZE[TRL], AT_THE_LARGER_SIZE[TRL_REBALANCED]]
    assert [float(one) for one in shown] == promised, f"README promises {shown}, results_table.py {promised}"


def test_padding():
    file = newest_contests()
    padding = json.loads(file.read_text(encoding="utf-8"))["padding"]["4"]
    shares = [100 * padding[how] for how in ("laid out", "packed", "random")]
    check("padding, %", file.name, figures_in(cells_of("padding of")[1]), shares)


def test_data_speed():
    found, [what, shown, _] = result_of("data_speed.json"), cells_of("preparing")
    names = ("of_raw_encode_batch", "of_raw_encode_batch_fast", "times_trl")
    check("preparing", "data_speed.json", figures_in(shown), [found[name] for name in names])
    promised = [data_speed.LEAST_OF_RAW, data_speed.LEAST_OF_TRL]
    check("promised of preparing", "data_speed.py", re.findall(r"promised: ([\d.]+)", what), promised)
    held_to = list(found["promised"].values())
    assert held_to == promised, f"data_speed.json was held to {held_to}, data_speed.py promises {promised}"


def test_start():
    found, [what, shown, _] = result_of("start_time.json"), cells_of("from launch to the first step")
    check("start", "start_time.json", figures_in(shown), [found["times_imports_and_load"]])
    broken, seconds = cells_of("recipe with mistakes")[1], found["seconds"]["plan of a broken recipe"]
    check("plan of a broken recipe, seconds", "start_time.json", figures_in(broken), [seconds])
    promised, held_to = start_time.MOST_OF_IMPORTS, found["promised"]["times_imports_and_load"]
    check("promised of the start", "start_time.py", re.findall(r"promised: ([\d.]+)", what), [promised])
    assert held_to == promised, f"start_time.json was held to {held_to}, start_time.py promises {promised}"


def test_loss_memory():
    pieces = result_of("loss_memory.json")["100% of tokens trained"]["pieces"]
    shown = figures_in(cells_of("loss of")[1])
    check("loss in pieces", "loss_memory.json", shown, [pieces["memory_of_plain"], pieces["times_plain"]])


def test_packing():
    found = result_of("packing_speed.json")
    [text] = re.findall(r"packed rows trained at (.*?) of the speed of padded ones, at micro-batches of (.*?) \(", TEXT)
    sizes = figures_in(text[1])
    values = [found[f"micro-batch {size}"]["times_padded"] for size in sizes]
    check(f"packing at {text[1]}", "packing_speed.json", figures_in(text[0]), values)
    measured = [name for name in found if name.startswith("micro-batch")]
    assert [f"micro-batch {size}" for size in sizes] == measured, f"packing_speed.json holds {measured}"
    ratios = [ratio for name in measured for ratio in found[name]["least_to_most"]]
    [around] = re.findall(r"single rounds lie between (.*?), on a machine .*? load average was ([\d.]+)\)", TEXT)
    values = [min(ratios), max(ratios), found["machine"]["load_average"][0]]
    check("packing, least, most and load", "packing_speed.json", figures_in(" ".join(around)), values)
