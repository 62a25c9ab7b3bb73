"""Verifiers of an answer against a known one: exact text, a number, mathematics.

Each takes (known answer, response) and returns a score from 0 to 1, or None where the *known* answer cannot
be read: then nothing is known of the response either.
"""

import re
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,300})"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]{{1,300}})?|\.[0-9]{{1,300}})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
_NUMBER = re.compile(
    rf"(?<![0-9.,/\w])(?P<sign>[-+]?)[$]?(?:"
    rf"\\[dt]?frac\{{(?P<top>[0-9]{{1,300}})\}}\{{(?P<bottom>[0-9]{{1,300}})\}}"
    rf"|(?P<whole>[0-9]{{1,300}})[ ](?P<numerator>[0-9]{{1,300}})/(?P<denominator>[0-9]{{1,300}})"
    rf"|(?P<over>{_DECIMAL})[ ]?/[ ]?(?P<under>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?P<percent>[ ]?\\?%)?"
    rf")(?![0-9/])"
)
MAX_RESPONSE = 20_000
"""Characters of a response that are read, from its end."""


def exact_answer(known: str, response: str) -> float:
    """The same text but for white space at its ends."""
    return float(response.strip() == known.strip())


def number_answer(known: str, response: str) -> float | None:
    """The last number of the response equals that of the known answer.

    ``72.``, ``72 apples`` and ``x = 72.0`` are 72, ``1,000`` is 1000, ``3/4`` and ``\\frac{3}{4}`` are 0.75,
    ``50%`` is 0.5 (and not 50).
    """
    wanted = last_number(known)
    return None if wanted is None else float(last_number(response) == wanted)


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text, exactly; None if there is none."""
    found = None
    for found in _NUMBER.finditer(text[-MAX_RESPONSE:]):  # noqa: B007 - the last one is wanted
        pass
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    part = found.groupdict()
    sign = -1 if part["sign"] == "-" else 1
    if part["top"]:
        return _ratio(sign, part["top"], part["bottom"])
    if part["whole"]:
        rest = _ratio(1, part["numerator"], part["denominator"])
        return None if rest is None else sign * (int(part["whole"]) + rest)
    if part["over"]:
        return _ratio(sign, part["over"], part["under"])
    value = sign * Fraction(part["decimal"].replace(",", ""))
    return value / 100 if part["percent"] else value


def _ratio(sign: int, top: str, bottom: str) -> Fraction | None:
    divisor = Fraction(bottom.replace(",", ""))
    return sign * Fraction(top.replace(",", "")) / divisor if divisor else None


def math_answer(known: str, response: str) -> float | None:
    """Equal as mathematics by math-verify: LaTeX, fractions, intervals, sets, symbols.

    Its own time limits use ``signal.alarm``, are caught, and turn into "not equal": they are switched off
    here, and the pool's deadline makes a hang what it is, a failure.
    """
    from math_verify import parse, verify

    wanted = parse(_as_math(known), parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    if not wanted:
        return None
    said = parse(response[-MAX_RESPONSE:], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(wanted, said, timeout_seconds=None, raise_on_error=True))


def _as_math(known: str) -> str:
    return known if "$" in known or "\\boxed" in known else f"${known}$"
