"""Units, currencies and degree signs behind a number, brought to one name each."""

from __future__ import annotations

import re

from gtpo_lightning.rewards.latex import DOLLAR, TEXT_CLOSE, TEXT_OPEN

__all__ = ["CODES", "CURRENCIES", "currency_name", "is_known_unit", "unit_name"]

CURRENCIES = f"{DOLLAR}€£¥₹"
CODES = ("USD", "EUR", "GBP", "JPY", "INR")

_NAMES = {
    DOLLAR: "dollar dollars usd buck bucks",
    "€": "euro euros eur",
    "£": "pound-sterling gbp",
    "¥": "yen jpy",
    "₹": "rupee rupees inr rs",
    "¢": "cent cents",
    "%": "percent percentage pct",
    "°": "degree degrees deg",
    "°c": "celsius",
    "°f": "fahrenheit",
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards yds",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "ml": "milliliter milliliters millilitre millilitres",
    "l": "liter liters litre litres",
    "gal": "gallon gallons",
    "ms": "millisecond milliseconds",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "day": "days",
    "week": "weeks wk wks",
    "month": "months",
    "yr": "year years yrs",
    "mi/h": "mph",
    "km/h": "kph kmh",
    "hz": "hertz",
    "rad": "radian radians",
    "unit": "units",
    "am": "a.m",
    "pm": "p.m",
    "th": "st nd rd",
}
_ALIASES = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
_ONE_LETTER = frozenset("mglshLNJWVACF")
# Words that make what follows a number more than a unit of it.
_MORE_THAN_UNITS = (
    "or and but not no nor if then else when where for mod modulo plus minus times over divided multiplied by sin cos "
    "tan cot csc log ln exp sqrt pi e i is are was base than less more least most to through factorial choose "
    "squared cubed wrong below under zero one ones two three four five six seven eight nine ten tens twenty"
)
# A multiplier or the part of a fraction is no unit: `5 thousand` and `5 fourths` are not 5.
_MULTIPLIERS = (
    "hundred thousand million billion trillion dozen score gross pair lakh crore googol mil mln mn bn tn couple twice "
    "double triple"
)
_PARTS = (
    "half third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth twentieth hundredth thousandth "
    "millionth billionth"
)
_COUNTING = [*_MULTIPLIERS.split(), *_PARTS.split()]
_NOT_UNITS = frozenset([*_MORE_THAN_UNITS.split(), "halves", *_COUNTING, *(f"{word}s" for word in _COUNTING)])
_NOT_LETTERS = frozenset("kKMBT")
_PREFIXES = frozenset({"square", "sq", "cubic", "cu", "per"})
_TOKEN = re.compile(r"[^\W\d_°%¢][^\W\d_]*(?:[.'-][^\W\d_]+)*\.?|°[A-Za-z]?|[%¢€£¥₹\x06]")
_POWER = re.compile(r" ?\^ ?\{? ?(-?[0-9]) ?\}?")
_LONGEST = 80


def _canonical(word: str) -> str:
    word = word.lower().rstrip(".")
    if word in _ALIASES:
        return _ALIASES[word]
    if word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _is_no_unit(word: str) -> bool:
    return word.lower() in _NOT_UNITS or word in _NOT_LETTERS


def _accepted(word: str, *, spaced: bool, marked: bool) -> bool:
    """Whether a word behind a number is its unit: `5 clips`, `5cm`, `5 m`; but `5m`, `5x` and `5 x` are products."""
    bare = word.rstrip(".")
    if marked or not bare[:1].isalpha():
        return True
    if len(bare) == 1:
        return spaced and bare in _ONE_LETTER
    return spaced or bare.lower() in _ALIASES


def currency_name(sign: str) -> str:
    """The one name of a currency, from its sign or its code.

    Args:
        sign: A character of `CURRENCIES` or one of `CODES`.

    Returns:
        The sign.

    Example:
        >>> currency_name("EUR")
        '€'
    """
    return _ALIASES[sign.lower()]


def is_known_unit(words: str) -> bool:
    """Whether words are a unit beyond doubt: each is a known name of two letters or more, or `square`, `cubic`, `per`.

    Args:
        words: Words with spaces between them.

    Returns:
        True or False.

    Example:
        >>> is_known_unit("square inches"), is_known_unit("x"), is_known_unit("apples")
        (True, False, False)
    """
    names = words.lower().split()
    return bool(names) and all(len(name) > 1 and (name in _ALIASES or name in _PREFIXES) for name in names)


def unit_name(rest: str) -> str | None:
    r"""The canonical name of a unit that follows a number.

    Args:
        rest: The marked text right behind the number. Text in `\text{}` may be any unit; bare text is one if it is
            words, a known abbreviation, or a known single letter with a space before it.

    Returns:
        The name: long names and plurals are brought to the short singular, `per` and `/` are one, powers are kept. None
        if the text is something other than a unit, such as a multiplier (`5 k`) or the part of a fraction (`5 tenths`).

    Example:
        >>> unit_name(" square inches"), unit_name("in^{2}"), unit_name(" miles per hour"), unit_name(" or 6")
        ('in^2', 'in^2', 'mi/h', None)
    """
    if len(rest) > _LONGEST:
        return None
    marked, spaced = TEXT_OPEN in rest, rest.startswith(" ")
    text = rest.replace(TEXT_OPEN, " ").replace(TEXT_CLOSE, "").strip(" .")
    names: list[str] = []
    prefix, at = "", 0
    while at < len(text):
        if text[at] in " /":
            names += ["/"] if text[at] == "/" else []
            spaced, at = spaced and text[at] == " ", at + 1
            continue
        token = _TOKEN.match(text, at)
        if (
            token is None
            or _is_no_unit(token[0].rstrip("."))
            or (names in ([], ["/"]) and not _accepted(token[0], spaced=spaced, marked=marked))
        ):
            return None
        at, word = token.end(), _canonical(token[0])
        if word in ("square", "sq", "cubic", "cu") and at < len(text):
            prefix = "^3" if word.startswith("cu") else "^2"
            continue
        power = _POWER.match(text, at)
        names.append("/" if word == "per" else word + (f"^{power[1]}" if power else prefix))
        at, prefix = power.end() if power else at, ""
    return _joined(names)


def _joined(names: list[str]) -> str | None:
    """One name; an amount in dollars stays one however often that is said."""
    if len(names) == 2 and names[0] == "°" and names[1] in ("c", "f", "°c", "°f"):
        names = [names[1] if names[1].startswith("°") else "°" + names[1]]
    words = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    return " ".join(words).replace(" / ", "/") or None
