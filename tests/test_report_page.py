"""The report in a real browser: nothing overflows, every point is there, every text can be read, nothing is loaded."""

import random

import pytest

from browser import open_page
from finished_runs import finished_place
from past_run_folders import held_out, step, write_run
from tunebook.runs.past import read_past_runs
from tunebook.runs.report import CURVES, render_report

pytestmark = pytest.mark.slow

WIDTHS = (360, 1280)
SCRIPT = """
function measure(window, document) {
  const found = {out: [], dim: [], charts: {}, tried: 0};
  found.wide = document.documentElement.scrollWidth - window.innerWidth;
  for (const svg of document.querySelectorAll("figure svg")) {
    const box = svg.viewBox.baseVal, name = svg.getAttribute("aria-label");
    for (const part of svg.querySelectorAll("text, circle, rect, polyline")) {
      const its = part.getBBox();
      if (its.x < 0 || its.y < 0 || its.x + its.width > box.width || its.y + its.height > box.height)
        found.out.push(name + ": " + part.outerHTML.slice(0, 90));
    }
    found.charts[name] = [...svg.querySelectorAll("g.curve")].map(curve => curve.querySelectorAll("circle").length);
  }
  for (const one of document.querySelectorAll("body *")) {
    const around = one.parentElement.getBoundingClientRect(), its = one.getBoundingClientRect();
    if (!one.closest("svg, .wide") && (its.left < -1 || its.right > window.innerWidth + 1))
      found.out.push(one.outerHTML.slice(0, 90));
    const says = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (says && its.width && !["STYLE", "TITLE"].includes(one.tagName.toUpperCase())) {
      const style = window.getComputedStyle(one), is_svg = one instanceof window.SVGElement;
      const ratio = contrast(colour(is_svg ? style.fill : style.color), behind(one, window));
      found.tried += 1;
      if (ratio < 4.5) found.dim.push(ratio.toFixed(2) + " " + one.outerHTML.slice(0, 90));
    }
  }
  for (const curve of document.querySelectorAll("g.curve")) {
    const ratio = contrast(colour(window.getComputedStyle(curve).color), behind(curve, window));
    if (ratio < 3) found.dim.push(ratio.toFixed(2) + " " + curve.outerHTML.slice(0, 90));
  }
  found.title = document.title;
  return found;
}
const colour = text => text.match(/[\\d.]+/g).map(Number);
function behind(one, window) {
  for (; one; one = one.parentElement) {
    const back = colour(window.getComputedStyle(one).backgroundColor);
    if (back.length === 3 || back[3] > 0) return back;
  }
  return [255, 255, 255];
}
function light([red, green, blue]) {
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const [r, g, b] = [red, green, blue].map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b;
}
function contrast(one, other) {
  const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
  return (high + .05) / (low + .05);
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A finished run beside a long one, a failed one with hostile texts, one of 0 steps, and six more for colours."""
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(0)
    evil = "<script>document.title = 'taken over'</script><img src=http://localhost:9/x>"
    long = [step(number, loss=draw.random() * 1e-4, tokens_per_second=1e6) for number in range(1, 5001)]
    lengths = {"start": 0, "width": 500, "counts": [draw.randrange(100_000) for _ in range(40)]}
    sample = {"prompt": evil + "x" * 900, "answer": "\u202e" + evil, "before": "a\nb", "after": None}
    rows = {"lengths": lengths, "tokens": 9, "trained_tokens": 4, "samples": [sample]}
    runs = [finished_place() / "runs" / "recipe"]
    runs += [write_run(folder / "long", [*long, *(held_out(at, 1e5) for at in (0, 5000))], rows=rows, model="y" * 300)]
    runs += [
        write_run(folder / evil.replace("/", "-"), [step(1), step(2, loss=float("nan"))], "failed", error=evil * 9)
    ]
    runs += [write_run(folder / "nothing", (), "interrupted", f"model: {{name_or_path: {'z' * 400}}}")]
    runs += [write_run(folder / f"run {number}", [step(1), step(9)]) for number in range(6)]
    return render_report(read_past_runs([str(run) for run in runs]))


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(page, dark):
    seen = open_page(page, SCRIPT, WIDTHS, dark)
    assert seen.console == ["measured"], "the script beside the page says so at its end; the page itself says nothing"
    assert set(seen.asked) == {"/beside.html", "/page.html"}, "the second frame may have it from the first"
    assert len(seen.found) == len(WIDTHS)
    for found in seen.found:
        assert found["wide"] <= 0 and found["out"] == []
        assert found["dim"] == [] and found["tried"] > 100
        assert found["charts"]["Loss"][:4] == [9, 400, 1, 0]
        assert found["charts"]["Held-out loss"][:3] == [4, 2, 0]
        assert found["title"].startswith("recipe, long, ")


def test_a_real_run_has_every_curve():
    [run] = read_past_runs([str(finished_place() / "runs" / "recipe")])
    assert {key for key, *_ in CURVES if not run.curve(key)} == set()
    assert [len(run.curve(key)) for key in ("loss", "tokens_per_second", "memory_bytes", "eval_loss")] == [9, 9, 9, 4]
    assert all(value > 0 for key in ("tokens_per_second", "memory_bytes") for _, value in run.curve(key))
    peak = run.summary["peak_memory_bytes"]
    assert max(value for _, value in run.curve("memory_bytes")) <= peak
    assert sum(run.rows["lengths"]["counts"]) == run.summary["num_train_rows"]
    assert len(run.rows["samples"]) == 2 and all(sample["after"] is not None for sample in run.rows["samples"])
