"""Verifiers of answers: near misses, algebra, and text that nobody meant to be an answer."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.environments.answers import exact_answer, last_number, math_answer, number_answer


@pytest.mark.parametrize(
    ("known", "response", "score"),
    [
        ("72", "72", 1),
        ("72", "72.", 1),  # the end of a sentence
        ("72", "72.0", 1),
        ("72", "The answer is 72. I hope this helps!", 1),
        ("72", "#### 72", 1),
        ("72", "\\boxed{72}", 1),
        ("72", "72 apples", 1),
        ("72", "$72", 1),
        ("72", "x=72", 1),
        ("72", "7.2", 0),
        ("72", "-72", 0),
        ("72", "720", 0),
        ("72", "27", 0),
        ("72", "72 or 73", 0),  # the last number counts
        ("72", "7 2", 0),
        ("72", "", 0),
        ("72", "seventy-two", 0),
        ("1000", "1,000", 1),
        ("1,000", "1000", 1),
        ("1000000", "1,000,000 km", 1),
        ("1000", "1,00", 0),
        ("1000", "10,00", 0),
        ("1000", "1.000", 0),
        ("1000", "1e3", 1),
        ("0.75", "3/4", 1),
        ("3/4", "0.75", 1),
        ("3/4", "6/8", 1),
        ("0.75", "\\frac{3}{4}", 1),
        ("0.75", "\\dfrac{3}{4}", 1),
        ("1.5", "1 1/2", 1),
        ("1.5", "3 / 2", 1),
        ("-0.5", "-1/2", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 0),
        ("0.5", "50\\%", 1),
        ("4", "3/0", 0),
        ("0.1", "0.10000000000000001", 0),  # exact: no floating point
        ("5", "5 km", 1),
        ("5", "5 km2", 1),
        ("x", "5", None),  # the known answer is no number: nothing is known
    ],
)
def test_numbers_and_their_near_misses(known, response, score):
    assert number_answer(known, response) == score


@pytest.mark.parametrize(
    ("known", "response", "score"),
    [
        ("72", "72.", 1),
        ("72", "$72$", 1),
        ("72", "So the answer is \\boxed{72}.", 1),
        ("72", "7.2", 0),
        ("72", "", 0),
        ("72", "no idea", 0),
        ("1000", "1,000", 1),
        ("\\frac{1}{2}", "0.5", 1),
        ("\\frac{1}{2}", "\\boxed{\\frac12}", 1),
        ("\\frac{1}{2}", "$\\frac{2}{4}$", 1),
        ("\\frac{1}{2}", "$\\frac{1}{3}$", 0),
        ("\\sqrt{2}", "$\\sqrt 2$", 1),
        ("\\sqrt{2}", "$\\sqrt{3}$", 0),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        ("x^2+2x+1", "$(x+2)^2$", 0),
        ("\\{1,2,3\\}", "$\\{3,2,1\\}$", 1),
        ("5", "$5\\text{ cm}$", 1),
    ],
)
def test_mathematics_and_its_near_misses(known, response, score):
    pytest.importorskip("math_verify", reason="the extra environments is not installed")
    assert math_answer(known, response) == score


def test_exact_text_forgives_white_space_alone():
    assert exact_answer("ab c", " ab c\n") == 1
    assert exact_answer("ab c", "ab  c") == exact_answer("ab c", "Ab c") == exact_answer("72", "72.") == 0


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_read_back_exactly(value):
    assert last_number(f"it is {value.numerator}/{value.denominator}") == value


@given(st.integers(-(10**15), 10**15), st.sampled_from(["{}", "{:,}", "{}.", "{}.0", "about {} m", "${}$"]))
def test_an_integer_is_read_back_however_it_is_written(value, written):
    assert last_number(written.format(value)) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_a_decimal_is_read_without_rounding(value):
    assert last_number(f"{value:f}") == Fraction(value)


@given(st.text(max_size=20))
def test_any_text_is_its_own_exact_answer(text):
    assert exact_answer(text, text) == 1.0


PIECES = [
    *"0123456789.,-+*/=()$%{}[]\\ \n^_eE",
    "\\frac",
    "{1}{2}",
    "\\boxed{",
    "1,000",
    "\\sqrt",
    "\u0663",
    "\u00bd",
    "72",
    "}" * 9,
]


@settings(max_examples=400, deadline=1000)
@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_fuzz_the_number_parser_answers_any_text(pieces):
    value = last_number("".join(pieces))
    assert value is None or isinstance(value, Fraction)


def test_a_long_response_costs_little():
    for text in (
        "9" * 400_000,
        "1," * 200_000,
        "1 " * 200_000,
        "-" * 400_000,
        "1/" * 200_000,
        "0." * 200_000,
    ):
        last_number(text)  # the test's own time limit is the assertion


def test_fuzz_mathematics_raises_or_scores_but_never_lies():
    """Whatever a response is, the score is 0, 1 or a failure; that garbage equals 72 would be a bug."""
    pytest.importorskip("math_verify", reason="the extra environments is not installed")
    chance = random.Random(0)
    for _ in range(60):
        text = "".join(chance.choice(PIECES[:-3]) for _ in range(chance.randint(1, 12)))
        try:
            score = math_answer("987654321", text)
        except Exception:  # a failure in the pool
            continue
        assert score in (0.0, 1.0) and (score == 0.0 or "987654321" in text)
