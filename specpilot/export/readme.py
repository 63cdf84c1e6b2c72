"""README.md of an exported engine, and the few sentences that both formats share."""

from __future__ import annotations

from typing import Any

from specpilot.export.evidence import final_figures
from specpilot.export.source import MergedStep, RunSource

_STEPS = """\
## Use it

    ./setup_env.sh                  # .venv with pinned packages (Python 3.11 or newer; a C++ compiler if there are native parts)
    ./download_models.sh            # the target's checkpoint into models/, digest-checked; TARGET_DIR names one you have
    ./serve.sh final 30000          # OpenAI API at http://127.0.0.1:30000/v1 ; also: stock, ar, final-ar
    ./bench.sh                      # this machine's own figures: all variants, interleaved, with ratios
    ./verify.sh                     # files against their checksums, then token forcing on hidden prompts

`serve.sh` listens on this machine only; `--host 0.0.0.0` opens it to the network, without any password.
`verify.sh` ends with 0 when everything holds, 8 when a file was changed (it names it), 7 when a token is not what the
target would emit. The digest of `evidence/SHA256SUMS` was printed at export: `./verify.sh --expect DIGEST` checks that
nobody rewrote the checksums too. ENGINE_PYTHON, THREADS, TARGET_DIR and ENGINE_CACHE override the defaults.

%CLIENT%
## What is here

    engine/      the winning engine          stock/       the engine as the run found it (also the reference)
    drafter/     the drafter's weights       prompts/     tuning and hidden prompts
    evidence/    report.html, journal.json, verdicts, comparisons, calibration, self-test, environment, checksums
    tools/       the programs behind the scripts; they need nothing of SpecPilot
"""


_CLIENT = """\
## What a client sends

    curl -s http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Name three primes."}], "temperature": 0, "max_tokens": 64}'

- `"temperature": 0`, in every request. Then each token is the target's own first choice, near-ties apart; that is what `verify.sh`
  checks. Without it the server samples at 1.0, as OpenAI's API does: answers differ from call to call.SAMPLING
- `"model"`: `"MODEL"`, or left out, as above. It is the name of the checkpoint's folder, so with TARGET_DIR it is that folder's; `GET /v1/models` says it.
- OpenAI's API: `GET /v1/models`, `POST /v1/completions`, `POST /v1/chat/completions`, each streaming with `"stream": true`. No key is asked for.
- The native API, SGLang's words: `POST /generate` (`input_ids` or `text`, `sampling_params`), `GET /health`, `GET /server_info`.
"""


def readme(source: RunSource, model: str) -> str:
    """The whole README. `model`: the name under which the target is served."""
    deployment = source.deployment
    sampling = (
        f" The load it was found for samples at {deployment.regime.temperature:g}: there the gate tests the distribution, not single tokens."
        if deployment.regime.temperature
        else ""
    )
    client = _CLIENT.replace("MODEL", model).replace("SAMPLING", sampling)
    lines = [
        f"# {deployment.name}: an engine found by SpecPilot",
        "",
        f"Run {source.run_id}, ended: {source.stop_reason}. Engine commit {source.best[:12]}, stock commit {source.first[:12]}.",
        f"Load it was found for: concurrency {deployment.regime.concurrency}, {deployment.regime.output_tokens} new tokens, "
        f"temperature {deployment.regime.temperature:g}.",
    ]
    if source.running:
        lines.append(f"The run was still being worked on by {source.running}: this is the best engine so far.")
    lines += ["", "## What it gained", "", *figures(source), "", "## What changed", ""]
    lines += [f"{number}. {sentence(step)}" for number, step in enumerate(source.merged, start=1)] or [
        "Nothing was merged."
    ]
    return "\n".join(lines) + "\n\n" + _STEPS.replace("%CLIENT%", client)


def figures(source: RunSource) -> list[str]:
    """The four figures of the closing session with their ratios, as lines; or why there are none."""
    measured = final_figures(source)
    if not measured.get("variants"):
        return ["The closing session was not measured: run ./bench.sh for figures of your machine."]
    lines = ["| variant | decode tokens/s (median) | accepted length |", "|---|---|---|"]
    for name, row in measured["variants"].items():
        length = row.get("accepted_length")
        lines.append(f"| {name} | {row['decode_tokens_per_s']:.1f} | {'-' if length is None else f'{length:.2f}'} |")
    lines.append("")
    for row in measured.get("ratios", []):
        if row["of"].startswith("final"):
            lines.append(
                f"- {row['of']} over {row['over']}: {row['ratio']:.2f}x [{row['low']:.2f}, {row['high']:.2f}] (paired, on the run's machine)"
            )
    return lines


def sentence(step: MergedStep) -> str:
    """One merged change: title, gain with interval, what the gate saw."""
    text = step.headline
    if step.result.get("gain"):
        text += f": {step.result['gain']:.3f}x [{step.result['low']:.3f}, {step.result['high']:.3f}] over the engine before it"
    if (seen := gate_words(step)) != "":
        text += f"; {seen}"
    return text + "."


def gate_words(step: MergedStep) -> str:
    """The gate's tally on the attempt, in words."""
    assessment: dict[str, Any] = (step.attempt.data.get("assessment") if step.attempt else None) or {}
    verdict = assessment.get("verdict") or {}
    if not verdict:
        return ""
    return (
        f"gate: {verdict.get('positions', 0)} tokens forced, {verdict.get('exact', 0)} exact, "
        f"{verdict.get('near_ties', 0)} near-ties, {verdict.get('violations', 0)} violations"
    )
