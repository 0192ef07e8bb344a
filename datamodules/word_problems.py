"""Short word problems around given numbers, for models that know English."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gtpo_lightning.datamodules.teacher import pick

__all__ = ["word_problem"]

_NAMES = ("Ada", "Ben", "Chloe", "Dario", "Emre", "Fatou", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_NOUNS = ("apple", "button", "coin", "marble", "pencil", "postcard", "seashell", "sticker", "ticket", "walnut")
_PACKS = ("bag", "basket", "crate", "drawer", "envelope", "tin")

# {a}, {b}, {c} are numbers with their noun ("1 apple", "7 apples"); {packs} a number of packs.
_SUMS = (
    "{name} has {a} and is given {b}. How many {nouns} does {name} have now?",
    "There are {a} in one {pack} and {b} in another. How many {nouns} are there in both?",
    "{name} counts {a} in the morning and {b} in the evening. How many {nouns} is that in total?",
    "{name} brings {a} and {other} brings {b}. How many {nouns} do they bring together?",
    "After {name} took out {a}, the {pack} still holds {b}. How many {nouns} were in the {pack} at first?",
)
_PRODUCTS = (
    "{name} fills {packs} with {b} each and keeps {c} aside. How many {nouns} does {name} have?",
    "A shop sells {packs} of {b} each and {c} singly. How many {nouns} does it sell?",
    "{name} has {packs}, each with {b} inside. {other} adds {c}. How many {nouns} are there altogether?",
    "On a table lie {packs} holding {b} each, and {c} beside them. How many {nouns} lie there?",
)


def word_problem(level: int, numbers: Sequence[int], random: Random) -> str:
    """A question in words whose answer is that of the level's expression.

    Args:
        level: 1 to 3 for a sum of two numbers, 4 for a*b+c.
        numbers: The numbers, in the expression's order.
        random: Draws template, names and things.

    Example:
        >>> word_problem(3, (17, 25), Random(1))
        'Kofi has 17 stickers and is given 25 stickers. How many stickers does Kofi have now?'
    """
    template = pick(_PRODUCTS if level == 4 else _SUMS, random)
    name, noun, pack = pick(_NAMES, random), pick(_NOUNS, random), pick(_PACKS, random)
    other = pick([person for person in _NAMES if person != name], random)
    words = {key: _count(number, noun) for key, number in zip("abc", numbers, strict=False)}
    packs = _count(numbers[0], pack)
    return template.format(name=name, other=other, nouns=f"{noun}s", pack=pack, packs=packs, **words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
