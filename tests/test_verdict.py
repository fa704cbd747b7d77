"""When a merged model passes, on numbers made for it."""

import math

import pytest
import torch

from tunebook.merge.verdict import Readings, judge, render_verification
from tunebook.merge.verifying import Probe, Reading

pytestmark = pytest.mark.slow
PROBE = Probe("2 fixed questions", ((1,), (2,)), (3,), 0)


def reading(values, choices=((5, 3), (6,))):
    return Reading(torch.tensor([values]), choices)


def verdict(merged, dtype="bfloat16", adapter=(1.0, -2.0), base=(1.5, -2.0), rounded=(1.5, -2.01), **more):
    rounded_base = None if dtype == "float32" else reading(rounded)
    readings = Readings(((5, 3), (6,)), reading(merged), reading(adapter), reading(base), rounded_base, **more)
    return judge(readings, PROBE, dtype, weight_error=0.1)


@pytest.mark.parametrize(
    ("dtype", "difference", "passes"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.1e-4, False),
        ("float32", math.nan, False),
        ("bfloat16", 0.029, True),
        ("bfloat16", 0.031, False),
        ("float16", math.nan, False),
        ("bfloat16", math.inf, False),
    ],
)
def test_a_merged_model_may_differ_as_far_as_rounding_explains(dtype, difference, passes):
    assert verdict((1.0, -2.0 + difference), dtype).passed == passes


def test_of_larger_logits_rounding_takes_more():
    adapter, merged = (1.0, -20.0), (1.0, -20.2)
    found = verdict(merged, adapter=adapter)
    assert found.passed and found.growth == 10 and found.allowed == pytest.approx(0.3, rel=0.01)
    assert "3 times 10.0 (so much larger" in render_verification(found, "4-bit")
    assert not verdict((1.0, -20.4), adapter=adapter).passed
    assert verdict((1.0, -2.0), base=(10.0, -20.0), rounded=(10.0, -20.1)).growth == 1, "smaller ones get no less"
    assert not verdict(merged, "float32", adapter=adapter).passed, "float32 has its fixed bound"


def test_the_table_tells_every_difference_and_greedy_text():
    trained = reading((1.0, -2.5), ((5, 3), (7,)))
    text = render_verification(verdict((1.0, -2.01), trained=trained), "8-bit")
    assert "| the merged model, read back from disk | 0.01 | 0.005 | 0.03 | 2 of 2 |" in text
    assert "| the adapter on the 8-bit base that it was trained on | 0.5 | 0.25 | reported only | 1 of 2 |" in text
    assert "| the base without the adapter | 0.5 | 0.25 |  |  |" in text
    assert "Rounding the weights takes 10.00% of what the adapter changes" in text
    assert "less than rounding" not in text
    assert "less than rounding" in render_verification(verdict((1.0, -2.01), base=(1.02, -2.0)), "4-bit")
    assert "times" not in render_verification(verdict((1.0, -2.0), "float32"), "4-bit")
