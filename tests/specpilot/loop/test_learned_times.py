"""Predicted and realised time of a component, by hand."""

from __future__ import annotations

import pytest

from specpilot.contracts import Claim, Gap, GapTable
from specpilot.loop.learn import component_ms, predicted_ms


def gap(component: str, measured: float, bound: float) -> Gap:
    return Gap(
        component=component, measured_ms=measured, bound_ms=bound, ratio=bound / measured, share=measured / 40,
        recoverable_ms=measured - bound, expected_gain=1.0, limit="bandwidth",
    )  # fmt: skip


TABLE = GapTable(
    commit="aa",
    rows=[
        gap("target.mlp", 20.0, 5.0),
        gap("target.head", 8.0, 6.0),
        gap("targeted", 2.0, 1.0),
        gap("host", 10.0, 0.5),
    ],
    round_ms=39.0,
    bound_ms=12.5,
    accepted_length=3.0,
    tokens_per_s=75.0,
    tokens_per_s_at_bound=240.0,
    share_of_bound=0.3,
)


def claim(component: str, gain: float | None) -> Claim:
    return Claim(component=component, hypothesis="h", predicted_gain=gain)


def test_a_component_is_its_row_what_it_covers_or_the_round() -> None:
    assert component_ms(TABLE, "target.mlp") == (20.0, 5.0)
    assert component_ms(TABLE, "target") == (28.0, 11.0), "`targeted` is another component"
    assert component_ms(TABLE, "*") == (40.0, 12.5)
    assert component_ms(TABLE, "draft") is None


@pytest.mark.parametrize(
    ("component", "gain", "left"),
    [
        ("target.mlp", 1.25, 12.0),  # the round of 40 ms takes 32: 8 of the component's 20 are gone
        ("target.mlp", 1.0, 20.0),
        ("target.mlp", 4.0, 5.0),  # 30 ms cannot be saved there: down to its bound
        ("*", 2.0, 20.0),
        ("host", 0.8, 20.0),  # a predicted loss of 10 ms
    ],
)
def test_what_a_predicted_gain_leaves(component: str, gain: float, left: float) -> None:
    assert predicted_ms(TABLE, claim(component, gain)) == pytest.approx(left)


def test_nothing_is_predicted_where_nothing_is_known() -> None:
    assert predicted_ms(None, claim("target.mlp", 1.25)) is None
    assert predicted_ms(TABLE, claim("target.mlp", None)) is None
    assert predicted_ms(TABLE, claim("draft", 1.25)) is None


def test_a_component_below_its_bound_is_not_predicted_to_slow_down() -> None:
    below = TABLE.model_copy(update={"rows": [gap("target.mlp", 4.0, 5.0), gap("host", 36.0, 1.0)]})
    assert predicted_ms(below, claim("target.mlp", 2.0)) == pytest.approx(4.0)
