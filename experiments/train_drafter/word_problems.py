"""Arithmetic word problems: openings that the target continues, and composed ones. GSM8K is never read here."""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = (
    "Maria Tom Lena Omar Priya Jack Sofia Daniel Aisha Ben Chloe Victor Nina Paul Grace Leo Emma Raj Hannah Samuel Zoe Carlos Ivy Peter Lucy Ahmed Ella Mark Tara Hugo "
    "Julia Kevin Mia Noah Olga Quinn Rita Steve Uma Wendy Yusuf Anna Brian Clara David Fiona George Helen Ian Kate Liam Megan Nathan Oscar Paula Rachel Simon Tina"
).split()
THINGS = (
    "apples books pencils marbles stickers cookies oranges cards toys stamps shirts flowers bottles cupcakes tickets balloons coins eggs candles notebooks bananas shells beads chairs "
    "muffins puzzles magazines plants sandwiches lollipops crayons erasers hats peaches photos boxes bracelets cans bags pies"
).split()
PLACES = "bakery farm school library store museum factory garden restaurant zoo theater bookstore market gym warehouse hotel park ranch clinic camp".split()
PEOPLE = "farmer teacher baker carpenter driver gardener painter librarian coach nurse shopkeeper tailor plumber student chef writer runner collector".split()
UNITS = ["miles", "kilometers", "pages", "minutes", "hours", "dollars", "pounds", "liters", "meters", "gallons"]
VERBS = "bought has sold made collected found picked baked read saved earned ran planted needs wants ordered received drank spent ate painted walked packed wrote".split()


def opening(rng: random.Random) -> str:
    """The first words of a word problem, with its first number, for the target to continue."""
    name, other, thing, n = (
        rng.choice(NAMES),
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.choice([rng.randint(2, 20), rng.randint(2, 60), 5 * rng.randint(2, 40), 10 * rng.randint(2, 60)]),
    )
    forms = [
        f"{name} {rng.choice(VERBS)} {n} {thing}", f"{name} {rng.choice(VERBS)} {n}", f"A {rng.choice(PEOPLE)} {rng.choice(VERBS)} {n}", f"There are {n} {thing}", f"There are {n}", f"A {rng.choice(PLACES)} has {n}",
        f"A {rng.choice(PLACES)} sells {thing} for ${n}", f"{name} and {other} {rng.choice(VERBS)} {n}", f"{name} is {n} years old", f"{name} is {n} years older than {other}", f"{name} works {n} hours", f"{name} earns ${n}",
        f"{name} has {n} times as many {thing} as {other}", f"{name} has {n} more {thing} than {other}", f"If {name} {rng.choice(VERBS)} {n}", f"A box of {thing} costs ${n}", f"Each {thing[:-1]} costs ${n}", f"{name} drives {n} miles",
        f"{name} needs {n} {rng.choice(UNITS)}", f"It takes {name} {n} minutes", f"A train travels {n} {rng.choice(UNITS[:2])}", f"{name} wants to buy", f"{name} is planning", f"In a class of {n} students", f"On Monday, {name} {rng.choice(VERBS)} {n}",
        f"{name}'s {rng.choice(['mother', 'brother', 'sister', 'friend', 'garden', 'class', 'car', 'dog', 'family', 'team'])} {rng.choice(['has', 'bought', 'needs', 'gave', 'is', 'uses'])} {n}", f"The {rng.choice(PLACES)} {rng.choice(['has', 'sold', 'ordered', 'opened', 'needs'])} {n}",
        f"Every day, {name}", f"{name} {rng.choice(VERBS)} twice as many {thing} as {other}", f"Half of the {n} {thing}", f"{n}% of", f"A tank holds {n} gallons", f"Last week, {name}", f"{name} bakes {n} trays of {thing}", f"{name} runs a",
    ]  # fmt: skip
    return rng.choice(forms)


def _shopping(rng: random.Random) -> str:
    name, (a, b) = rng.choice(NAMES), rng.sample(THINGS, 2)
    p, q, m, n = rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 12), rng.randint(2, 12)
    paid = (p * m + q * n) // 10 * 10 + rng.choice([10, 20, 50])
    return f"{name} buys {m} {a} for ${p} each and {n} {b} for ${q} each. " + rng.choice(
        [
            f"{name} pays with ${paid}. How much change does {name} get?",
            "How much does it cost in total?",
            f"How much more do the {a} cost than the {b}?",
        ]
    )


def _sharing(rng: random.Random) -> str:
    name, thing, friends, each, extra = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(2, 12),
        rng.randint(2, 15),
        rng.randint(1, 20),
    )
    return f"{name} has {friends * each + extra} {thing}. {name} keeps {extra} and shares the rest equally among {friends} friends. How many {thing} does each friend get?"


def _comparison(rng: random.Random) -> str:
    (a, b, c), thing, n = rng.sample(NAMES, 3), rng.choice(THINGS), rng.randint(4, 40)
    k, more = rng.randint(2, 5), rng.randint(2, 20)
    return f"{a} has {n} {thing}. {b} has {rng.choice([f'{k} times as many', 'twice as many', f'{more} more'])} {thing} {'as' if rng.random() < 0.7 else 'than'} {a}. {c} has {more} {rng.choice(['more', 'fewer'])} {thing} than {b}. How many {thing} do they have altogether?"


def _speed(rng: random.Random) -> str:
    name, v, t, w = rng.choice(NAMES), 5 * rng.randint(2, 14), rng.randint(2, 8), 5 * rng.randint(2, 14)
    return (
        f"{name} drives at {v} miles per hour for {t} hours and then at {w} miles per hour for {rng.randint(1, 6)} hours. "
        + rng.choice(["How many miles does {0} travel in total?", "What distance does {0} cover?"]).format(name)
    )


def _wages(rng: random.Random) -> str:
    name, rate, hours, days, weeks = (
        rng.choice(NAMES),
        rng.randint(8, 30),
        rng.randint(3, 9),
        rng.randint(3, 6),
        rng.randint(2, 6),
    )
    tail = rng.choice(
        [
            f"How much does {name} earn in {weeks} weeks?",
            f"{name} spends ${rng.randint(2, 9) * 10} a week and saves the rest. How much is saved in {weeks} weeks?",
        ]
    )
    return f"{name} works as a {rng.choice(PEOPLE)} for {hours} hours a day, {days} days a week, and earns ${rate} per hour. {tail}"


def _percent(rng: random.Random) -> str:
    place, n, p = rng.choice(PLACES), 20 * rng.randint(2, 30), rng.choice([10, 20, 25, 30, 40, 50, 60, 75])
    thing = rng.choice(THINGS)
    return f"A {place} has {n} {thing}. {p}% of them are sold on Saturday and {rng.choice(['half', 'a quarter', '20%', 'a third'])} of the remaining {thing} are sold on Sunday. How many {thing} are left?"


def _days(rng: random.Random) -> str:
    name, thing, n, step = rng.choice(NAMES), rng.choice(THINGS), rng.randint(3, 30), rng.randint(2, 12)
    return f"On Monday {name} sold {n} {thing}. On Tuesday {name} sold {rng.choice([f'{step} more than on Monday', 'twice as many as on Monday', 'half as many as on Monday'])}, and on Wednesday {step} fewer than on Tuesday. How many {thing} did {name} sell over the three days?"


def _age(rng: random.Random) -> str:
    (a, b), n, k, later = rng.sample(NAMES, 2), rng.randint(5, 40), rng.randint(2, 4), rng.randint(2, 20)
    return (
        f"{a} is {n} years old. {b} is {rng.choice([f'{k} times as old as', f'{later} years older than', f'{min(later, n - 1)} years younger than'])} {a}. "
        + rng.choice([f"How old will {b} be in {later} years?", "What is the sum of their ages?"])
    )


def _boxes(rng: random.Random) -> str:
    name, thing, boxes, each, given = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(3, 20),
        rng.randint(4, 24),
        rng.randint(2, 30),
    )
    return f"{name} packs {thing} into {boxes} boxes with {each} {thing} in each box. {name} then gives away {given} {thing} and buys {rng.randint(2, 9)} more boxes of {each}. How many {thing} does {name} have now?"


KINDS: list[Callable[[random.Random], str]] = [
    _shopping,
    _sharing,
    _comparison,
    _speed,
    _wages,
    _percent,
    _days,
    _age,
    _boxes,
]


def composed(rng: random.Random) -> str:
    """A word problem from one of nine families."""
    return rng.choice(KINDS)(rng)
