"""Prompts that are never asked twice.

A deployment's prompt file is finite; an engine under test could remember answers. So each use of a text gets a
short natural phrase with a code ("Task 48213-bk.") inside the user's turn. Codes are a secret permutation of a
counter: they never repeat within a pool and cannot be predicted from earlier ones. Everything follows from
(secret, offset), so that a resumed run continues where it stopped. The hidden files are read only from here and
never leaves the evaluator's process except as token ids.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import string
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specpilot.contracts import Record
from specpilot.deployment import Deployment
from specpilot.errors import MissingModelError, UsageError

SETS = ("tuning", "hidden", "closing")
"""`closing` is the part of the hidden files that nothing but the closing session asks: an engine that has been merged saw the
others, in the gate and while it was timed, and may have kept what it answered."""

CLOSING_SHARE = 4
"""One in so many of the hidden texts of each source is for the closing session."""

USER_TURNS = (
    "<|im_start|>user\n",
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<start_of_turn>user\n",
    "<|user|>\n",
    "[INST] ",
)
"""Openings of a user's turn in common chat templates; the phrase goes right behind the first one found."""

PHRASES = ("Task {}.", "Case {}.", "Item {}.", "Question {}.", "Ticket {}.", "Exercise {}.")

CODES = 90_000 * 26 * 26
"""Distinct codes: five digits (no leading zero) and two letters."""

PHRASE_TOKENS = 16
"""Room kept for the phrase: no tokenizer in use needs more for one."""


class Prompt(Record):
    """One prompt, ready to send. `id` is unique per use, `source` names the data it came from."""

    id: str
    source: str
    text: str
    ids: list[int]


class PromptPool:
    """Deterministic, non-repeating prompts of the sets, stratified by source."""

    def __init__(
        self,
        deployment: Deployment,
        tokenizer: Path,
        secret: str,
        offsets: dict[str, int] | None = None,
    ) -> None:
        """`tokenizer` is the target's tokenizer.json (or its folder); `offsets` is the `.offsets` of an earlier session."""
        hidden = deployment.prompt_files("hidden")
        self._files = {"tuning": deployment.prompt_files("tuning"), "hidden": hidden, "closing": hidden}
        self._input_tokens = deployment.regime.input_tokens
        path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        if not path.is_file():
            raise MissingModelError(f"no tokenizer at {path}", "the target's folder must hold tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._secret = secret.encode()
        self.offsets = {name: 0 for name in SETS} | dict(offsets or {})
        self._loaded: dict[str, list[dict[str, str]]] = {}
        self._orders: dict[tuple[str, int], list[int]] = {}

    def take(self, which: str, n: int) -> list[Prompt]:
        """The next `n` prompts of a set; advances `.offsets`."""
        if which not in SETS:
            raise ValueError(f"set must be one of {SETS}, got {which!r}")
        start = self.offsets[which]
        prompts = [self._make(which, start + k) for k in range(n)]
        self.offsets[which] = start + n
        return prompts

    def stream(self, which: str) -> Iterator[Prompt]:
        """Prompts without end; each advances `.offsets` when it is drawn."""
        while True:
            yield from self.take(which, 1)

    def _make(self, which: str, position: int) -> Prompt:
        rows = self._rows(which)
        epoch, place = divmod(position, len(rows))
        row = rows[self._order(which, epoch)[place]]
        code = code_of(self._secret, len(SETS) * position + SETS.index(which))
        text = with_phrase(row["text"], self._phrase(code), code)
        return Prompt(id=f"{which}/{row['id']}/{code}", source=row["source"], text=text, ids=self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _phrase(self, code: str) -> str:
        return PHRASES[_digest(self._secret, f"phrase:{code}")[0] % len(PHRASES)]

    def _order(self, which: str, epoch: int) -> list[int]:
        """Row indices of one pass over the set: shuffled inside each source, sources evenly mixed."""
        key = (which, epoch)
        if key not in self._orders:
            self._orders[key] = stratified(
                [row["source"] for row in self._rows(which)],
                random.Random(_digest(self._secret, f"order:{which}:{epoch}")),
            )
        return self._orders[key]

    def _rows(self, which: str) -> list[dict[str, str]]:
        """The set's rows that fit the regime, phrase included."""
        if which not in self._loaded:
            limit = self._input_tokens - PHRASE_TOKENS
            rows = [row for path in self._files[which] for row in read_prompts(path)]
            fitting = [row for row in rows if len(self._ids(row["text"])) <= limit]
            if not fitting:
                raise UsageError(
                    f"no {which} prompt is shorter than regime.input_tokens = {self._input_tokens} "
                    f"(less {PHRASE_TOKENS} for the phrase that makes each use unique)",
                    "raise regime.input_tokens or give shorter prompts",
                )
            self._loaded[which] = part_of(fitting, which)
        return self._loaded[which]


def part_of(rows: list[dict[str, str]], which: str) -> list[dict[str, str]]:
    """The rows of a set's files that belong to the set: `hidden` and `closing` share theirs, by text, for good.

    By a digest of the text, so that no run ever asks one of the closing texts for anything else. Where a source has fewer than
    `CLOSING_SHARE` texts all of them stay hidden; where no source has more, both sets are the whole.
    """
    if which == "tuning":
        return rows
    texts: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        texts[row["source"]].add(row["text"])
    kept: set[str] = set()
    for found in texts.values():
        ordered = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
        kept |= set(ordered[: len(ordered) // CLOSING_SHARE])
    if not kept or all(row["text"] in kept for row in rows):
        return rows
    return [row for row in rows if (row["text"] in kept) is (which == "closing")]


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Rows {"id", "source", "text"} of a prompt file. Raises UsageError with file and line."""
    if not path.is_file():
        raise UsageError(f"no prompt file {path}", "fix workload in deployment.yaml")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        rows.append(_row(line, path, number))
    if not rows:
        raise UsageError(f"{path} holds no prompts", "one JSON object per line: id, source, text")
    return rows


def check_prompt_files(deployment: Deployment) -> None:
    """Reads both sets whole, so that a broken line is told before anything is spent.

    Raises UsageError for it, for a prompt that is in both sets (what workers may see is not hidden), and for a gate that
    wants more hidden prompts than there are.
    """
    sets = {"tuning": deployment.prompt_files("tuning"), "hidden": deployment.prompt_files("hidden")}
    rows = {which: [row for path in files for row in read_prompts(path)] for which, files in sets.items()}
    texts = {which: {row["text"]: row["id"] for row in found} for which, found in rows.items()}
    for key in ("hidden_prompts", "natural_stop_prompts"):
        if getattr(deployment.gate, key) > len(texts["hidden"]):
            raise UsageError(
                f"deployment {deployment.name}: gate.{key}: {getattr(deployment.gate, key)} is outside the allowed range, "
                f"at most {len(texts['hidden'])}: so many different prompts do workload.hidden's files hold",
                "lower it, or write more hidden prompts.",
            )
    shared = [texts["hidden"][text] for text in texts["hidden"] if text in texts["tuning"]]
    if shared:
        raise UsageError(
            f"deployment {deployment.name}: {len(shared)} hidden prompt(s) are also tuning prompts, first {shared[0]!r}",
            "keep the two sets apart: workers may see the tuning set.",
        )


def _row(line: str, path: Path, number: int) -> dict[str, str]:
    try:
        row: Any = json.loads(line)
        return {"id": str(row["id"]), "source": str(row.get("source", "default")), "text": _text(row["text"])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path}:{number}: not a prompt ({type(error).__name__}: {error})",
            'expected {"id": ..., "source": ..., "text": ...}',
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text is empty or no string")
    return value


def with_phrase(text: str, phrase: str, code: str) -> str:
    """`text` with the phrase at the start of the first user turn, or at the very start if there is no turn."""
    words = phrase.format(code)
    for opening in USER_TURNS:
        at = text.find(opening)
        if at >= 0:
            at += len(opening)
            return f"{text[:at]}{words} {text[at:]}"
    return f"{words} {text}"


def stratified(sources: list[str], rng: random.Random) -> list[int]:
    """A permutation of row indices in which every prefix holds each source in about its share."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, source in enumerate(sources):
        groups[source].append(index)
    keyed = []
    for name in sorted(groups):
        members = groups[name]
        rng.shuffle(members)
        shift = rng.random()
        keyed += [((rank + shift) / len(members), index) for rank, index in enumerate(members)]
    return [index for _, index in sorted(keyed)]


def code_of(secret: bytes, counter: int) -> str:
    """The code of use number `counter`: injective below CODES, unpredictable without the secret.

    A four-round Feistel network with HMAC rounds on 26 bits, walked until it lands below CODES
    (cycle walking, Black and Rogaway 2002).
    """
    if not 0 <= counter < CODES:
        raise UsageError(f"a run may use at most {CODES} prompts", "start a new run")
    value = counter
    while True:
        value = _feistel(secret, value)
        if value < CODES:
            break
    number, letters = divmod(value, 26 * 26)
    first, second = divmod(letters, 26)
    return f"{10_000 + number}-{string.ascii_lowercase[first]}{string.ascii_lowercase[second]}"


def _feistel(secret: bytes, value: int) -> int:
    left, right = value >> 13, value & 0x1FFF
    for round_number in range(4):
        mixed = int.from_bytes(_digest(secret, f"code:{round_number}:{right}")[:4], "big") & 0x1FFF
        left, right = right, left ^ mixed
    return left << 13 | right


def _digest(secret: bytes, message: str) -> bytes:
    return hmac.new(secret, message.encode(), hashlib.sha256).digest()
