"""Units of measure in answers: names and symbols, as powers of known units."""

import re

CURRENCIES = "\uff04\u00a3\u20ac\u00a5\u20b9"  # the fullwidth dollar stands for a dollar that delimits no formula
Unit = tuple[tuple[str, int], ...]

PREFIXES = (
    *("", "k kilo", "K kilo", "M mega", "G giga", "T tera", "h hecto", "d deci", "c centi", "m milli"),
    *("\u00b5 micro", "\u03bc micro", "n nano", "p pico"),
)
METRIC = (
    *("m|meter metre", "g|gram gramme", "s|second sec", "J|joule", "W|watt", "N|newton", "V|volt", "A|ampere amp"),
    *("Hz|hertz", "Pa|pascal", "B|byte", "L l|liter litre", "mol|mole", "eV|electronvolt", "Wh|watthour"),
    *("\u03a9 \u2126|ohm", "cal|calorie", "K|kelvin"),
)
OTHERS = (
    *("in inch inche", "ft foot feet", "yd yard", "mi mile", "oz ounce", "pound lb lbs gbp \u00a3 pounds"),
    *("ton tonne", "gal gallon", "qt quart", "pt pint", "cup", "tablespoon tbsp", "teaspoon tsp", "acre"),
    *("hectare ha", "knot", "min minute", "h hour hr", "day", "week wk", "month", "year yr", "decade"),
    *("century centurie", "degree deg circ", "celsius", "fahrenheit", "radian rad"),
    *("percent pct percentage %", "dollar usd us\uff04 \uff04", "cent \u00a2", "euro eur \u20ac"),
    *("yen jpy \u00a5", "rupee inr rs \u20b9", "yuan cny rmb", "am", "pm", "atm atmosphere", "bar", "psi"),
    *("hp horsepower", "bit", "kb kilobit", "Mb megabit", "Gb gigabit", "decibel db dB", "rpm"),
)


def _known_names() -> dict[str, str]:
    """Return the names and symbols of the known units, each with one name."""
    known: dict[str, str] = {name: names.split()[0] for names in OTHERS for name in names.split()}
    for prefix in PREFIXES:
        short, _, long = prefix.partition(" ")
        for unit in METRIC:
            symbols, names = (part.split() for part in unit.split("|"))
            for name in [short + symbol for symbol in symbols] + [long + name for name in names]:
                known.setdefault(name, long + names[0])
    return known


KNOWN = _known_names()
MULTIPLES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MULTIPLES |= {"wan": 10**4, "yi": 10**8}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
ABBREVIATIONS = {"mph": "mile / hour", "kmh": "km / h", "kmph": "km / h", "kph": "km / h"}
IGNORED = {"unit", "units", *MULTIPLES, *(f"{name}s" for name in MULTIPLES)}
TOKEN = re.compile(rf"\^\s*\{{?\s*(-?[0-9])|us\uff04|[A-Za-z\u00b5\u03bc\u03a9\u2126]+|[/%\u00a2{CURRENCIES}]")


def is_unit(text: str, *, apart: bool) -> bool:
    """Return True if text behind a number is a unit or words, and no product of variables or list.

    Args:
        text: Text behind a number.
        apart: True if a space precedes the text.
    """
    tokens = [token for token in _tokens(text) if token not in ("/", "^")]
    if any(token.casefold() in ("or", "and", "to") for token in tokens):
        return False
    return all(token[0] == "^" or _is_name(token, apart=apart) or token in ("of", "in") for token in tokens)


def _is_name(token: str, *, apart: bool) -> bool:
    if _name_of_unit(token) is None:
        return apart and (len(token) > 2 or token in IGNORED or token in POWERS)
    return apart or len(token) > 1 or not token.isalpha()


def unit_of(text: str) -> Unit | None:
    """Return the powers of the known units in a text, empty for other words; None if the text has no words."""
    tokens = _tokens(text)
    powers, sign, power, last, words = dict[str, int](), 1, 1, "", False
    for number, token in enumerate(tokens):
        lower = token.casefold()
        known = _name_of_unit(token)
        if lower == "in" and tokens[number + 1 :] and tokens[number + 1].isalpha():
            known = None  # in total
        if lower in ("/", "per"):
            sign = -1
        elif token[0] == "^" and last:
            powers[last] *= int(token[1:])
        elif lower in POWERS:
            power = POWERS[lower]
            if lower.endswith("d") and last:
                powers[last], power = powers[last] * power, 1
        elif known is not None:
            last, words = known, True
            powers[known], power = powers.get(known, 0) + sign * power, 1
        else:
            words = words or lower not in IGNORED
    if powers.keys() & {"celsius", "fahrenheit", "kelvin"}:
        powers.pop("degree", None)
    return tuple(sorted(powers.items())) if words else None


def _tokens(text: str) -> list[str]:
    text = re.sub(r"\b([aApP])\.\s?([mM])\b\.?", r"\1\2", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)|\\(?:circ|degree)\b", " degree ", text)
    text = re.sub(r"\bdegrees?\s+C\b", " celsius ", re.sub(r"\bdegrees?\s+F\b", " fahrenheit ", text))
    text = re.sub(r"\\(cdot|times)\b", " ", text).replace(r"\Omega", " ohm ").replace(r"\mu", " \u00b5")
    text = re.sub(r"\bC\b", "celsius", re.sub(r"\bF\b", "fahrenheit", text))
    text = " ".join(ABBREVIATIONS.get(word.casefold(), word) for word in text.split())
    return ["^" + found[1] if found[1] else found.group() for found in TOKEN.finditer(text)]


def _name_of_unit(token: str) -> str | None:
    """Return the name of a unit, whose symbol has upper and lower case letters."""
    lower = token.casefold()
    names = (token, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((KNOWN[name] for name in names if name in KNOWN), None)
