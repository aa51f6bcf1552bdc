"""The estimate of a step's time: its terms by hand, and how it must move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.planner import Setting
from agentr1_lite.shapes import Shape
from agentr1_lite.timing import CARDS, Card, Work, expected_curve, step_seconds

# hidden 10, one layer, one head: linear weights 4 · 10 · 10 + 3 · 10 · 20 = 1000, head 10 · 100 = 1000
TOY = Shape("toy", 10, 1, 1, 1, 10, 20, 100)
CARD = Card("toy", 1, tflops=1e-9, bandwidth=1e-6)  # 300 usable operations a second (η = 0.3), 1,000 bytes a second


def setting(**changes) -> Setting:
    usual = {"quantized": False, "batch_size": 1, "group_size": 2, "prompt_tokens": 10, "max_rows": 2}
    return Setting(TOY, **{**usual, "gradient_checkpointing": True, **changes})


def test_by_hand():
    found = step_seconds(setting(), CARD, Work(sampled=3, response=5))
    flops, weights = 300.0, 2000
    decode = max(2 * weights / 1000, 2 * weights * 2 / flops) + 2 * (10 + 2.5) * 2 * 10 * 2 / 1000 + 80 * 8e-6
    fed = 10 + 2 * (5 - 3)
    assert found["rollout"] == pytest.approx(3 * decode + 2 * weights * fed / flops)
    assert found["log-prob"] == pytest.approx(2 * weights * (10 + 2 * 5) / flops)
    assert found["update"] == pytest.approx(6 * weights * 2 * (10 + 5) / flops)


def test_recomputing_costs_a_pass_and_prompts_that_are_not_shared():
    kept = step_seconds(setting(gradient_checkpointing=False), CARD, Work(3, 5))
    assert kept["update"] == pytest.approx(4 * 2000 * (10 + 2 * 5) / 300)
    ppo = step_seconds(setting(critic=True), CARD, Work(3, 5))
    assert ppo["update"] == pytest.approx(2 * step_seconds(setting(), CARD, Work(3, 5))["update"])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 2000), st.booleans())
def test_more_work_takes_longer_and_a_better_card_less(batch, group, response, quantized):
    base = setting(batch_size=batch, group_size=group, quantized=quantized, max_rows=64)
    work = Work(sampled=max(response // 2, 1), response=response)
    total = sum(step_seconds(base, CARDS["T4"], work).values())
    assert sum(step_seconds(replace(base, batch_size=batch + 1), CARDS["T4"], work).values()) > total
    assert sum(step_seconds(base, CARDS["T4"], Work(work.sampled, response + 1)).values()) > total
    assert sum(step_seconds(base, CARDS["H200"], work).values()) < total


def test_data_sheets():
    """Tesla T4, L4, A100 40 GB and H200 data sheets: dense 16-bit tensor operations and memory bandwidth."""
    sheet = {"T4": (65, 320), "L4": (121, 300), "A100": (312, 1555), "H200": (989, 4800)}
    assert {name: (c.tflops, c.bandwidth) for name, c in CARDS.items()} == sheet
    assert [name for name, c in CARDS.items() if not c.bf16] == ["T4"]


def test_curve_gains_half_of_the_way_every_half():
    assert [expected_curve(k * 10, 0.1, 0.5, 10) for k in range(3)] == pytest.approx([0.1, 0.3, 0.4])
