"""Numbers as people and JSON say them."""

import json
import math

import pytest

from minitransformer.words import duration, perplexity, short, to_json


@pytest.mark.parametrize(("number", "words"), [
    (1_088_208, "1.09 M"), (500, "500"), (2e12, "2 T"), (None, "-"), (0, "0"), (999_999, "1 M"), (999.6, "1 k"),
    (12_340, "12.3 k"), (5e20, "500 E"), (0.25, "0.25"), (1e-7, "1e-07"), (-1500, "-1.5 k"),
], ids=str)  # fmt: skip
def test_short_numbers(number, words):
    assert short(number) == words


@pytest.mark.parametrize(("number", "words"), [(1536, "1.54 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (12, "12 B")])
def test_short_numbers_with_a_unit(number, words):
    assert short(number, "B") == words


@pytest.mark.parametrize(("seconds", "words"), [
    (0, "0 s"), (119.4, "119 s"), (120, "2.0 min"), (5000, "83.3 min"), (7200, "2.0 h"), (172_800, "2.0 days"),
    (1e9, "11,574.1 days"),
])  # fmt: skip
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_json_has_null_for_numbers_that_it_lacks():
    value = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"ü": 2, "c": True}, "d": None}
    known = {"a": [1.5, None, [None, None]], "b": {"ü": 2, "c": True}, "d": None}
    assert to_json(value) == json.dumps(known, ensure_ascii=False)


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (2.0, math.exp(2)), (709.0, math.exp(709)), (710.0, math.inf)]
)
def test_perplexity(loss, expected):
    assert perplexity(loss) == expected
    assert math.isnan(perplexity(math.nan))
