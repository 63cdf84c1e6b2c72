"""Python functions to complete: invented signatures, composed tasks with executed examples, and the standard library's
own signatures and docstrings. HumanEval is never read here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

VERBS = (
    "count find get remove filter sum sort reverse merge split check is has compute calculate convert replace rotate shift "
    "group flatten encode decode parse format validate normalize select insert swap multiply average first last next longest "
    "shortest largest smallest min max unique common closest nearest partition interleave compress expand trim pad join match"
).split()
NOUNS = (
    "words vowels digits numbers letters characters list string array matrix pairs triples primes factors divisors squares cubes "
    "evens odds duplicates elements items values keys dictionary substring prefix suffix palindromes anagrams brackets "
    "sequence subarray range interval intervals dates scores prices temperatures names sentences lines tokens bits binary "
    "hex roman_numerals fibonacci factorial gcd lcm median mode mean sum product difference intersection union indices "
    "positions rows columns diagonal spiral path tree nodes stack queue points distances triangles rectangles circles coins "
    "change passwords emails ips versions spaces punctuation uppercase lowercase consonants polynomials coefficients"
).split()
TAILS = [
    "",
    "",
    "",
    "",
    "_in_list",
    "_of_string",
    "_by_length",
    "_greater_than",
    "_with_index",
    "_if_even",
    "_sorted",
    "_k",
    "_n",
    "_between",
    "_from_text",
    "_count",
]
PARAMETERS = [
    ("numbers", "List[int]"), ("nums", "list"), ("lst", ""), ("arr", "List[int]"), ("values", "List[float]"), ("s", "str"), ("text", "str"), ("string", "str"),
    ("words", "List[str]"), ("strings", "List[str]"), ("n", "int"), ("x", "int"), ("k", "int"), ("d", "dict"), ("data", "Dict[str, int]"), ("matrix", "List[List[int]]"),
    ("grid", ""), ("sentence", "str"), ("items", "list"), ("a", "int"), ("b", "int"), ("l", "list"), ("array", ""), ("txt", ""), ("num", ""), ("pairs", "List[Tuple[int, int]]"),
]  # fmt: skip
SECOND = [
    ("k", "int"),
    ("n", "int"),
    ("target", "int"),
    ("threshold", "float"),
    ("b", "int"),
    ("y", "int"),
    ("substring", "str"),
    ("other", "List[int]"),
    ("limit", "int"),
    ("q", ""),
    ("sep", "str"),
    ("char", "str"),
]
RETURNS = ["int", "bool", "str", "List[int]", "List[str]", "float", "list", "Tuple[int, int]", "Optional[int]", "dict"]
STARTS = [
    "", "", "", " ", " ", "\n    ", "\n    ", " Return ", " Check if ", "\n    Given ", " Given ", "\n    Write a function that ", "\n    You are given ", "\n    Create a function ",
    " Find ", " For a given ", " From a ", " Input ", "\n    Return ", "\n    This function takes ", "\n    In this ", " Count ", " Remove ", "\n    The function ", "\n    A ", " Calculate ",
]  # fmt: skip


def _name(rng: random.Random) -> str:
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}{rng.choice(TAILS)}"
    if rng.random() < 0.15:
        name = rng.choice(NOUNS)
    if rng.random() < 0.06:
        first, *rest = name.split("_")
        name = first + "".join(part.title() for part in rest)
    return name


def open_function(rng: random.Random) -> tuple[str, str]:
    """(source up to an open docstring, its quote); typed and untyped signatures, with and without imports."""
    typed = rng.random() < 0.5
    parameters = [rng.choice(PARAMETERS)] + ([rng.choice(SECOND)] if rng.random() < 0.4 else [])
    names = list(dict.fromkeys(parameters))
    written = [f"{name}: {kind}" if typed and kind else name for name, kind in names]
    returns = f" -> {rng.choice(RETURNS)}" if typed else ""
    signature = f"def {_name(rng)}({', '.join(written)}){returns}:"
    used = sorted({word for word in ("List", "Tuple", "Optional", "Dict") if word in signature})
    imports = f"from typing import {', '.join(used)}\n\n\n" if used else ""
    quote = '"""' if rng.random() < 0.85 else "'''"
    start = rng.choice(STARTS).rstrip(" ")  # a lone space at the end would be a token the continuation never follows
    return f"{imports}{signature}\n    {quote}{start}", quote


# Composed tasks: a filter, a map and a reduction over a list of integers, or a chain of two string operations.
Filter = tuple[str, Callable[[int], bool]]
FILTERS: list[Filter] = [
    ("even", lambda v: v % 2 == 0), ("odd", lambda v: v % 2 == 1), ("positive", lambda v: v > 0), ("negative", lambda v: v < 0), ("non-zero", lambda v: v != 0),
    ("divisible by 3", lambda v: v % 3 == 0), ("greater than 5", lambda v: v > 5), ("less than 10", lambda v: v < 10), ("at least 4", lambda v: v >= 4), ("single-digit", lambda v: 0 <= v < 10),
    ("divisible by 5", lambda v: v % 5 == 0), ("between 2 and 8 inclusive", lambda v: 2 <= v <= 8), ("not divisible by 4", lambda v: v % 4 != 0),
]  # fmt: skip
MAPS: list[tuple[str, Callable[[int], int]]] = [
    ("", lambda v: v), ("", lambda v: v), ("the squares of ", lambda v: v * v), ("twice ", lambda v: 2 * v), ("the absolute values of ", abs), ("the cubes of ", lambda v: v**3), ("one more than ", lambda v: v + 1),
]  # fmt: skip
REDUCTIONS: list[tuple[str, str, Callable[[list[int]], Any]]] = [
    ("the sum of", "sum", sum), ("the number of distinct values among", "count", lambda v: len(set(v))), ("the list of", "list", list), ("the largest of", "max", lambda v: max(v, default=None)),
    ("the smallest of", "min", lambda v: min(v, default=None)), ("the product of", "product", lambda v: __import__("math").prod(v)), ("in sorted order", "sorted", sorted), ("in reverse order", "reversed", lambda v: v[::-1]),
    ("the first of", "first", lambda v: v[0] if v else None), ("the last of", "last", lambda v: v[-1] if v else None), ("the running totals of", "running", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
]  # fmt: skip
STRING_STEPS: list[tuple[str, str, Callable[[str], str]]] = [
    ("remove all vowels", "remove_vowels", lambda s: "".join(c for c in s if c.lower() not in "aeiou")), ("reverse it", "reverse", lambda s: s[::-1]), ("convert it to upper case", "upper", str.upper),
    ("swap the case of every letter", "swapcase", str.swapcase), ("remove all spaces", "remove_spaces", lambda s: s.replace(" ", "")), ("keep only the letters", "letters", lambda s: "".join(c for c in s if c.isalpha())),
    ("capitalize every word", "capitalize", str.title), ("reverse the order of its words", "reverse_words", lambda s: " ".join(s.split()[::-1])), ("sort its words alphabetically", "sort_words", lambda s: " ".join(sorted(s.split()))),
    ("replace every space with an underscore", "underscores", lambda s: s.replace(" ", "_")), ("remove repeated characters, keeping the first", "dedupe", lambda s: "".join(dict.fromkeys(s))), ("keep every second character", "every_second", lambda s: s[::2]),
    ("sort its characters", "sort_chars", lambda s: "".join(sorted(s))), ("double every character", "double", lambda s: "".join(c * 2 for c in s)), ("drop its first and last character", "inner", lambda s: s[1:-1]),
]  # fmt: skip
SAMPLE_WORDS = "hello world apple banana code python data river green stone Quick brown Fox jumps over lazy dog Sun moon Star tree house Cat bird".split()


def _examples(rng: random.Random, name: str, make: Callable[[], Any], answer: Callable[[Any], Any], style: int) -> str:
    lines = []
    for _ in range(rng.randint(1, 3)):
        argument = make()
        result = answer(argument)
        shown = repr(argument)
        lines.append(
            [
                f">>> {name}({shown})\n    {result!r}",
                f"{name}({shown}) == {result!r}",
                f"{name}({shown}) ➞ {result!r}",
                f"For {shown} the result is {result!r}",
            ][style]
        )
    return "\n    ".join(lines)


def composed(rng: random.Random) -> str:
    """A function to complete with a docstring whose examples were computed, not invented."""
    style = rng.choice([0, 0, 0, 1, 1, 2, 3])
    typed = rng.random() < 0.5
    if rng.random() < 0.6:
        (kept, keep), (mapped, change), (reduced, label, reduce) = (
            rng.choice(FILTERS),
            rng.choice(MAPS),
            rng.choice(REDUCTIONS),
        )
        word = kept.split()[0].replace("-", "_")
        name = rng.choice(
            [
                f"{label}_{word}",
                f"{word}_{label}",
                f"{label}_of_{word}_numbers",
                f"get_{label}_{word}",
                f"{label}_{word}_elements",
            ]
        )
        noun = rng.choice(["numbers", "integers", "elements", "values"])
        parameter = rng.choice(["numbers", "nums", "lst", "arr", "values", "l"])
        order = (
            f"{mapped}the {noun} of {parameter} that are {kept}"
            if mapped
            else f"the {noun} of {parameter} that are {kept}"
        )
        body = f"{order} {reduced}" if reduced.startswith("in ") else f"{reduced} {order}"
        signature = f"def {name}({parameter}{': List[int]' if typed else ''}):"
        imports = "from typing import List\n\n\n" if typed else ""
        examples = _examples(
            rng,
            name,
            lambda: [rng.randint(-9, 20) for _ in range(rng.randint(3, 7))],
            lambda v: reduce([change(x) for x in v if keep(x)]),
            style,
        )
    else:
        (first, one, f), (second, two, g) = rng.sample(STRING_STEPS, 2)
        name = rng.choice([f"{one}_and_{two}", f"{one}_then_{two}", f"transform_{one}", f"process_{two}"])
        parameter = rng.choice(["s", "text", "string", "sentence", "txt"])
        body, imports = f"{parameter} after these steps: {first}, then {second}", ""
        signature = f"def {name}({parameter}{': str' if typed else ''}){' -> str' if typed else ''}:"
        examples = _examples(
            rng, name, lambda: " ".join(rng.sample(SAMPLE_WORDS, rng.randint(1, 4))), lambda v: g(f(v)), style
        )
    lead = rng.choice(
        [
            " Return ",
            "\n    Return ",
            "\n    Write a function that returns ",
            " Returns ",
            "\n    Given the input, return ",
        ]
    )
    return f'{imports}{signature}\n    """{lead}{body}.\n    {examples}\n    """'


def standard_library() -> list[str]:
    """Functions of the standard library as tasks: signature and docstring, in a fixed order."""
    tasks = set()
    for info in pkgutil.iter_modules():
        if info.name not in sys.stdlib_module_names or info.name.startswith(
            ("_", "test", "idlelib", "antigravity", "this", "turtle")
        ):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(info.name)
        except Exception:  # a module that needs a display or another system is no loss
            continue
        for owner in [
            module,
            *(value for _, value in inspect.getmembers(module, inspect.isclass) if value.__module__ == info.name),
        ]:
            for name, function in inspect.getmembers(owner, inspect.isroutine):
                docstring = inspect.getdoc(function)
                if (
                    name.startswith("__")
                    or not docstring
                    or not 30 <= len(docstring) <= 700
                    or '"""' in docstring
                    or "```" in docstring
                ):
                    continue
                try:
                    signature = str(inspect.signature(function))
                except (TypeError, ValueError):
                    continue
                if len(signature) < 160 and " at 0x" not in signature and "<" not in signature:
                    indented = docstring.replace("\n", "\n    ")
                    tasks.add(f'def {name}{signature}:\n    """{indented}\n    """')
    return sorted(tasks)
