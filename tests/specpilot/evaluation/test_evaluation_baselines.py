"""The four named figures against engines of known speed."""

from __future__ import annotations

import statistics

import pytest

from specpilot.contracts import Leg
from specpilot.deployment import Deployment, MeasurementSettings, Regime
from specpilot.evaluation.baselines import Baselines, measure_variants
from specpilot.evaluation.errors import ShortAnswer
from specpilot.evaluation.prompts import PromptPool

REGIME = Regime(concurrency=1, output_tokens=16)


@pytest.fixture
def prompts(deployment: Deployment):
    return PromptPool(deployment, deployment.folder / "target", "baselines").take("tuning", 5)


def test_four_figures(engine, prompts) -> None:
    servers = [
        ("ar", engine(commit="aa", variant="ar", round_s=0.020)),
        ("stock", engine(commit="aa", round_s=0.030)),
        ("final", engine(commit="bb", variant="final", round_s=0.015)),
        ("final-ar", engine(commit="bb", variant="final-ar", round_s=0.010)),
    ]
    heard: list[tuple[str, int]] = []
    kept: dict[str, list[Leg]] = {}
    found = measure_variants(
        servers,
        prompts,
        settings=MeasurementSettings(),
        regime=REGIME,
        on_leg=lambda name, k, rate: heard.append((name, k)),
        keep=kept,
    )
    assert set(found.variants) == {"ar", "stock", "final", "final-ar"} and found.prompts == 5
    # every prompt: all four, each time another one first
    assert [name for name, _ in heard[0::4]] == ["ar", "stock", "final", "final-ar", "ar"]
    # three tokens per round of 30 ms against one per 20 ms; then half the round time
    assert found.ratio("final", "ar").ratio > found.ratio("stock", "ar").ratio > 1.2
    final = found.ratio("final", "stock")
    assert final.ratio > 1.2 and final.low < final.median < final.high
    # what the client's own clock says of every answer, worked out once more
    rates = {name: [g.decoded / g.decode_s for leg in legs for g in leg.generations] for name, legs in kept.items()}
    assert final.pairs == pytest.approx([a / b for a, b in zip(rates["final"], rates["stock"], strict=True)])
    assert final.ratio == pytest.approx(statistics.geometric_mean(final.pairs)) and len(final.pairs) == 5
    assert final.median == pytest.approx(statistics.median(final.pairs))
    assert found.variants["stock"].accepted_length == 3.0
    assert found.variants["ar"].accepted_length == found.variants["final-ar"].accepted_length == 1.0
    stock = found.variants["stock"]
    assert stock.tpot_s == pytest.approx(1 / stock.decode_tokens_per_s, rel=0.1)
    assert stock.tokens == 80 and stock.ttft_s >= 0.002 and len(stock.rates) == 5
    assert Baselines.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(KeyError):
        found.ratio("ar", "final")
    assert all(not server.frozen for _, server in servers)
    asked = [prompt.ids for prompt in prompts]
    for name in found.variants:
        assert [g.prompt_ids for leg in kept[name] for g in leg.generations] == asked
    assert kept["final"][0].generations[0].output_ids == kept["ar"][0].generations[0].output_ids
    left = found.without({"final": "wrong tokens"})
    assert set(left.variants) == {"ar", "stock", "final-ar"} and left.withheld == {"final": "wrong tokens"}
    assert {name for figure in left.ratios for name in (figure.of, figure.over)} == {"ar", "stock", "final-ar"}
    assert found.withheld == {} and len(found.variants) == 4


def test_concurrency_takes_batches_of_prompts(engine, prompts) -> None:
    servers = [("ar", engine(variant="ar")), ("stock", engine())]
    regime = Regime(concurrency=2, output_tokens=16)
    found = measure_variants(servers, prompts, settings=MeasurementSettings(), regime=regime)
    assert found.prompts == 4 and len(found.variants["ar"].rates) == 2
    assert [(figure.of, figure.over) for figure in found.ratios] == [("stock", "ar"), ("ar", "stock")]


def test_a_short_answer_is_no_figure(engine, prompts) -> None:
    servers = [("ar", engine(variant="ar")), ("stock", engine(short_by=2))]
    with pytest.raises(ShortAnswer):
        measure_variants(servers, prompts, settings=MeasurementSettings(), regime=REGIME)


def test_needs_prompts_and_names(engine, prompts) -> None:
    server = engine()
    for servers, some in (([("a", server)], prompts[:1]), ([("a", server), ("a", server)], prompts), ([], prompts)):
        with pytest.raises(ValueError, match="needs"):
            measure_variants(servers, some, settings=MeasurementSettings(), regime=REGIME)
