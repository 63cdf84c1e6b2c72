"""Which stored mechanisms fit a run, in which order, and why: pure functions over records.

Order: verified on this hardware class, then verified elsewhere, then unproven, then refuted here. Within a
group: expected gain (what this very deployment measured, drawn towards the estimate; else the lower end of the interval; steps
of 5 %), then the time the cost model says the
component wastes, then fewer missing requirements. A mechanism never comes before one it requires.
Nothing is forbidden: what was refuted here is offered last, and says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from .records import Effect, Preconditions, Recalled, RecallQuery, StoredMechanism

SEED_RUN = "seedrun"
"""Name that the seeds' effects bear for the one run, on the machine of the development, that made them."""
GAIN_STEP = 0.05
"""Lower ends closer than this are one expected gain; the component's wasted time decides between them."""
NO_GAIN = ("no-gain", "no-gain-in-sum")
"""Reasons of a refutation that is a measurement of a gain."""
ELSEWHERE_DISCOUNT = 0.5
"""Share of a gain that is expected to carry over from another hardware class, or from a prediction alone."""


def rank(candidates: Iterable[StoredMechanism], query: RecallQuery) -> list[Recalled]:
    """Everything in `candidates` that is not in the engine yet, fitting ones in order, then the unfit ones by name.

    An unfit one has `unmet` filled; `MemoryStore.recall` drops those, `MemoryStore.assess` shows them.
    """
    pool = [item for item in candidates if item.mechanism.name not in query.present]
    assessed = {item.mechanism.name: _assess(item, query) for item in pool}
    changed = True
    while changed:  # a mechanism whose requirement cannot be met here cannot be met either
        changed = False
        for name, recalled in assessed.items():
            missing = [need for need in recalled.waits_for if need not in assessed or assessed[need].unmet]
            if missing and not recalled.unmet:
                unmet = [f"it requires {need}, which is not in the engine and does not fit here" for need in missing]
                assessed[name] = recalled.model_copy(update={"unmet": unmet})
                changed = True
    fitting = sorted((r for r in assessed.values() if not r.unmet), key=lambda r: _order(r, query))
    unfit = sorted((r for r in assessed.values() if r.unmet), key=lambda r: r.name)
    return _requirements_first(fitting) + unfit


def unmet_preconditions(needs: Preconditions, query: RecallQuery) -> list[str]:
    """Preconditions that do not hold for `query`, one plain sentence each."""
    unmet: list[str] = []
    if needs.engine is not None and needs.engine != query.engine:
        unmet.append(f"it patches engine {needs.engine}, this run uses {query.engine}")
    if needs.hardware is not None:
        if needs.hardware.kind != query.hardware.kind:
            unmet.append(f"it needs a {needs.hardware.kind}, this device is a {query.hardware.kind}")
        have = {item.lower() for item in query.hardware.isa}
        lacking = [item for item in needs.hardware.isa if item.lower() not in have]
        if lacking:
            unmet.append(f"it needs {', '.join(lacking)}, which this device lacks")
    if needs.architectures and query.architecture not in needs.architectures:
        unmet.append(f"it knows {', '.join(needs.architectures)} targets, this one is {query.architecture}")
    if needs.drafters and query.drafter not in needs.drafters:
        unmet.append(f"it knows {', '.join(needs.drafters)} drafters, this one is {query.drafter}")
    regime = needs.regime
    if regime.max_concurrency is not None and query.concurrency > regime.max_concurrency:
        unmet.append(f"it helps up to concurrency {regime.max_concurrency}, this regime has {query.concurrency}")
    if regime.min_concurrency is not None and query.concurrency < regime.min_concurrency:
        unmet.append(f"it helps from concurrency {regime.min_concurrency}, this regime has {query.concurrency}")
    if regime.max_temperature is not None and query.temperature > regime.max_temperature:
        unmet.append(f"it helps up to temperature {regime.max_temperature:g}, this regime has {query.temperature:g}")
    return unmet


def _assess(stored: StoredMechanism, query: RecallQuery) -> Recalled:
    mechanism = stored.mechanism
    here = [e for e in stored.effects if e.hardware.hardware_class == query.hardware.hardware_class]
    on_this = _refuted_on_this(here, query)
    refuted = on_this or _refuted_here(here, query)
    score, basis = _expected_gain(stored, here, query)
    waits_for = [name for name in mechanism.requires if name not in query.present]
    parts = [basis]
    if refuted is not None:
        parts.append(f"but refuted on this kind of machine ({refuted.reason} on {refuted.deployment}): tried last")
    wasted = _wasted_ms(mechanism.component, query)
    if wasted > 0:
        parts.append(f"{mechanism.component} wastes {wasted:.1f} ms per round here")
    if waits_for:
        parts.append(f"waits for {', '.join(waits_for)}")
    return Recalled(
        stored=stored,
        score=score,
        why="; ".join(parts),
        waits_for=waits_for,
        unmet=unmet_preconditions(mechanism.preconditions, query),
        refuted_here=refuted is not None,
        refuted_on_this=_refutation(on_this) if on_this else "",
    )


def _on_this(here: list[Effect], query: RecallQuery) -> list[Effect]:
    """Effects on this very deployment, newest first."""
    return [
        e for e in here if query.deployment_fingerprint and e.deployment_fingerprint == query.deployment_fingerprint
    ]


def _refuted_on_this(here: list[Effect], query: RecallQuery) -> Effect | None:
    """The newest effect on this very deployment that says something, if it is a refutation.

    "No effect shown" says nothing against an earlier proof here whose ratio its interval still holds: that measurement
    was only too noisy to see it.
    """
    same = _on_this(here, query)
    for position, effect in enumerate(same):
        if effect.outcome == "verified":
            return None
        proofs = [e.ratio for e in same[position + 1 :] if e.outcome == "verified"]
        if not (merely_null(effect) and proofs and effect.high >= proofs[0]):
            return effect
    return None


def _refuted_here(here: list[Effect], query: RecallQuery) -> Effect | None:
    """The newest refutation on this class of machine, where this very deployment has none to tell and no other has a proof."""
    if not _on_this(here, query) and here and all(e.outcome == "refuted" for e in here):
        return here[0]
    return None


def merely_null(effect: Effect) -> bool:
    """Measured without an effect that could be told from none."""
    return effect.outcome == "refuted" and effect.reason == "no-gain" and effect.low < 1.0 < effect.high


def measured_by(effect: Effect) -> str:
    """Which run measured an effect, and there which round's worker: what an attempt's id (`r3-search-1`) begins with."""
    if effect.run == SEED_RUN:
        return "the run that made the seed memory"
    who = f", round {effect.round}, {effect.worker}" if effect.worker and effect.round is not None else ""
    return f"run {effect.run}{who}" if effect.run else "an unknown run"


def _refutation(effect: Effect) -> str:
    what = "no effect" if merely_null(effect) else effect.reason
    return f"{what}: {effect.ratio:.2f}x [{effect.low:.2f}, {effect.high:.2f}], {measured_by(effect)}"


def measured_here(here: list[Effect], query: RecallQuery) -> list[Effect]:
    """Effects on this very deployment and kind of machine that say what the mechanism gains, newest first.

    Nulls and losses are measurements as well. What the gate refused is the gain of another thing; an open interval holds none.
    """
    told = (e for e in _on_this(here, query) if e.outcome == "verified" or e.reason in NO_GAIN)
    return [e for e in told if e.low > 0.0 and math.isfinite(e.high)]


def _expected_gain(stored: StoredMechanism, here: list[Effect], query: RecallQuery) -> tuple[float, str]:
    """(expected ratio, the sentence that says where it comes from).

    In logarithms each measurement by this very deployment has one part, and the estimate without them one; that estimate is
    first brought inside the newest interval, so that no claim, however large, outbids what was measured.
    """
    estimate, basis = _estimated_gain(stored, here, query)
    told = measured_here(here, query)
    if not told:
        return estimate, basis
    estimate = min(max(stored.mechanism.predicted_gain or estimate, told[0].low), told[0].high)
    logs = [math.log(e.ratio) for e in told]
    expected = math.exp((sum(logs) + math.log(estimate)) / (len(logs) + 1))
    times = "once" if len(logs) == 1 else f"{len(logs)} times"
    return (
        expected,
        f"measured {math.exp(statistics.fmean(logs)):.2f}x here before ({times}), expected {expected:.2f}x; {basis}",
    )


def _estimated_gain(stored: StoredMechanism, here: list[Effect], query: RecallQuery) -> tuple[float, str]:
    """The same without what this very deployment measured."""
    verified_here = [e for e in here if e.outcome == "verified"]
    if verified_here:
        low = statistics.median(e.low for e in verified_here)
        where = ", ".join(sorted({e.deployment for e in verified_here}))
        return low, f"verified on {query.hardware.hardware_class} ({where}): at least {low:.2f}x"
    elsewhere = [e for e in stored.effects if e.outcome == "verified"]
    if elsewhere:
        low = statistics.median(e.low for e in elsewhere)
        classes = ", ".join(sorted({e.hardware.hardware_class for e in elsewhere}))
        return _discount(low), f"verified on {classes} only: at least {low:.2f}x there"
    if stored.mechanism.predicted_gain is not None:
        return _discount(
            stored.mechanism.predicted_gain
        ), f"never verified; predicted {stored.mechanism.predicted_gain:.2f}x"
    return 1.0, "never verified, no prediction"


def _discount(ratio: float) -> float:
    return 1.0 + (ratio - 1.0) * ELSEWHERE_DISCOUNT


def _wasted_ms(component: str, query: RecallQuery) -> float:
    """Recoverable ms of `component`; `*` or a prefix such as `target` sums what it covers."""
    return sum(
        ms
        for name, ms in query.recoverable_ms.items()
        if component == "*" or name == component or name.startswith(component + ".")
    )


def _order(recalled: Recalled, query: RecallQuery) -> tuple[int, int, float, int, str]:
    effects = recalled.stored.effects
    here = query.hardware.hardware_class
    if recalled.refuted_here:
        tier = 3
    elif any(e.outcome == "verified" and e.hardware.hardware_class == here for e in effects):
        tier = 0
    elif any(e.outcome == "verified" for e in effects):
        tier = 1
    else:
        tier = 2
    gain_steps = round((recalled.score - 1.0) / GAIN_STEP)
    wasted = _wasted_ms(recalled.stored.mechanism.component, query)
    return tier, -gain_steps, -wasted, len(recalled.waits_for), recalled.name


def _requirements_first(ordered: list[Recalled]) -> list[Recalled]:
    """Same order, except that each mechanism is placed after those it waits for."""
    by_name = {item.name: item for item in ordered}
    placed: dict[str, Recalled] = {}

    def place(item: Recalled, chain: tuple[str, ...]) -> None:
        if item.name in placed or item.name in chain:
            return
        for need in item.waits_for:
            if need in by_name:
                place(by_name[need], (*chain, item.name))
        placed[item.name] = item

    for item in ordered:
        place(item, ())
    return list(placed.values())
