"""In: numbers, times, sums in words. Out: the same fit to be spoken, and back. Knows no persona."""

from __future__ import annotations

import re
from datetime import datetime
from fractions import Fraction

_SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_SMALL = _SMALL_WORDS.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = ((1_000_000_000, "billion"), (1_000_000, "million"), (1000, "thousand"))
_ORDINAL_ENDINGS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
# What a recogniser writes for a number when its sound is another word's too.
_HOMOPHONES = {"to": "two", "too": "two", "for": "four", "won": "one", "ate": "eight", "oh": "zero"}
_OPERATORS = {
    "plus": "+",
    "and": "+",
    "add": "+",
    "minus": "-",
    "less": "-",
    "times": "*",
    "multiplied": "*",
    "x": "*",
    "divided": "/",
    "over": "/",
}
_SYMBOLS = {"+": " plus ", "*": " times ", "×": " times ", "÷": " divided ", "/": " divided "}
_LIMIT = 10**12


def number_words(number: int) -> str:
    """-1_000_000_000_000 < number < 1_000_000_000_000, in English words."""
    if abs(number) >= _LIMIT:
        raise ValueError("too large to say")
    if number < 0:
        return f"minus {number_words(-number)}"
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[rest]}" if rest else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")
    for scale, name in _SCALES:
        if number >= scale:
            count, rest = divmod(number, scale)
            joint = " and " if 0 < rest < 100 else " "
            return f"{number_words(count)} {name}" + (joint + number_words(rest) if rest else "")
    raise AssertionError("unreachable: every size has a name")


def ordinal_words(number: int) -> str:
    words = number_words(number)
    head, separator, last = re.fullmatch(r"(.*?)([- ]?)(\w+)", words).groups()  # type: ignore[union-attr]
    if last in _ORDINAL_ENDINGS:
        last = _ORDINAL_ENDINGS[last]
    else:
        last = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return f"{head}{separator}{last}"


def time_words(now: datetime) -> str:
    hour = number_words(now.hour % 12 or 12)
    part = "in the morning" if now.hour < 12 else "in the afternoon"
    part = "in the evening" if now.hour >= 18 else part
    if now.minute == 0:
        return f"{hour} o'clock {part}"
    minute = number_words(now.minute)
    return f"{hour} {'oh ' if now.minute < 10 else ''}{minute} {part}"


def date_words(now: datetime) -> str:
    return f"{now:%A}, {now:%B} {ordinal_words(now.day)}"


def time_of_day(now: datetime) -> str:
    if 5 <= now.hour < 12:
        return "morning"
    return "afternoon" if 12 <= now.hour < 18 else "evening"


def parse_number(words: list[str]) -> int | None:
    """The whole list as one number ("two hundred and five", "42"); None if it is none."""
    if not words:
        return None
    if len(words) == 1 and words[0].isdigit() and len(words[0]) < 12:
        return int(words[0])
    total = group = 0
    for index, word in enumerate(words):
        if word == "and" and 0 < index < len(words) - 1:
            continue
        if word in _SMALL:
            group += _SMALL.index(word)
        elif word in _TENS:
            group += 10 * (_TENS.index(word) + 2)
        elif word == "hundred":
            group = max(group, 1) * 100
        elif word in ("thousand", "million", "billion"):
            scale = next(scale for scale, name in _SCALES if name == word)
            total += max(group, 1) * scale
            group = 0
        else:
            return None
    return total + group


def solve(text: str) -> str | None:
    """Answers the one sum that a sentence holds ("what is seven plus five"), else None."""
    text = re.sub(
        r"(?<=\d)\s*-\s*(?=\d)", " minus ", re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    )
    for symbol, word in _SYMBOLS.items():
        text = text.replace(symbol, word)
    words = re.findall(r"[a-z]+|\d+", text)
    for index, word in enumerate(words):
        operator = _OPERATORS.get(word)
        if operator is None:
            continue
        after = index + 2 if words[index + 1 : index + 2] == ["by"] else index + 1
        certain = word in ("plus", "minus", "times", "divided")
        left = _number_ending_at(words, index, certain)
        right = _number_starting_at(words, after, certain)
        # "and" is a sum only between bare numbers that it does not itself join to one.
        if left is None or right is None or (word == "and" and "hundred" in words):
            continue
        return _answer(left, operator, right)
    return None


def _number_ending_at(words: list[str], end: int, guess: bool) -> int | None:
    for start in range(max(0, end - 8), end):
        number = parse_number(words[start:end])
        if number is not None:
            return number
    return parse_number([_HOMOPHONES.get(words[end - 1], "")]) if guess and end else None


def _number_starting_at(words: list[str], start: int, guess: bool) -> int | None:
    for end in range(min(len(words), start + 8), start, -1):
        number = parse_number(words[start:end])
        if number is not None:
            return number
    if not guess or start >= len(words):
        return None
    return parse_number([_HOMOPHONES.get(words[start], "")])


def _answer(left: int, operator: str, right: int) -> str | None:
    if operator == "/" and right == 0:
        return "Nothing can be divided by zero, not even by me."
    exact = {
        "+": lambda: Fraction(left + right),
        "-": lambda: Fraction(left - right),
        "*": lambda: Fraction(left * right),
        "/": lambda: Fraction(left, right),
    }[operator]()
    name = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[operator]
    if abs(exact) >= _LIMIT:
        return "That number is too big for me to say."
    question = f"{number_words(left)} {name} {number_words(right)}"
    if exact.denominator == 1:
        return _sentence(f"{question} is {number_words(int(exact))}")
    rounded = round(abs(exact), 2)
    whole, cents = divmod(int(rounded * 100), 100)
    digits = f"{cents:02d}".rstrip("0")
    sign = "minus " if exact < 0 else ""
    spoken = f"{sign}{number_words(whole)}"
    if digits:
        spoken += " point " + " ".join(number_words(int(digit)) for digit in digits)
    return _sentence(f"{question} is {'about ' if rounded != abs(exact) else ''}{spoken}")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
