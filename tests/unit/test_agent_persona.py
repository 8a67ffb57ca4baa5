"""The scripted conversation: what must be in each answer, and what no answer may be."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from characters_serve.agent.persona import MAX_WORDS, ScriptedPersona
from characters_serve.agent.spoken import (
    date_words,
    number_words,
    ordinal_words,
    parse_number,
    solve,
    time_words,
)
from characters_serve.messages import Persona

NOW = datetime(2026, 3, 22, 9, 5)
MIRA = Persona(
    name="Mira",
    greeting="Hi, I'm Mira. Lovely to meet you.",
    facts={
        "age": "34",
        "home": "a lighthouse by the sea",
        "job": "a lighthouse keeper",
        "favourite_colour": "sea green",
        "favourite_food": "fish pie",
        "fun_fact": "I once counted nine hundred ships.",
        "dog": "called Biscuit",
    },
    likes=["storms", "old maps", "tea"],
    instructions="Warm and calm.",
)
BARE = Persona("Robin", "", {}, [], "")


def mira(seed: int = 1) -> ScriptedPersona:
    return ScriptedPersona(MIRA, seed)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ("What is your name?", "Mira"),
        ("who are you", "Mira"),
        ("how old are you", "thirty-four years old"),
        ("Where do you live?", "lighthouse by the sea"),
        ("what do you do for a living", "lighthouse keeper"),
        ("what is your favourite colour", "sea green"),
        ("what's your favorite food", "fish pie"),
        ("tell me about your dog", "Biscuit"),
        ("tell me about yourself", "Mira"),
        ("do you like storms", "storms"),
        ("what time is it", "nine oh five in the morning"),
        ("what day is it today", "Sunday, March twenty-second"),
        ("what is seven plus five", "twelve"),
        ("how much is 12 times 12", "one hundred and forty-four"),
        ("what is ten divided by four", "two point five"),
        ("my name is peter", "Peter"),
        ("I like music.", "usic"),
        ("I live in London", "ondon"),
        ("tell me something interesting", "nine hundred ships"),
        ("what's your favourite movie", "movie"),
        # as the small recogniser heard them
        ("where you from", "lighthouse"),
        ("where do u s", "lighthouse"),
        ("what is your favorite color", "sea green"),
        ("what day is it to that", "Sunday"),
        ("and what is your name please", "Mira"),
    ],
)
def test_answers_hold_what_was_asked(heard: str, expected: str, seed: int) -> None:
    assert expected in mira(seed).reply(heard, NOW)


@pytest.mark.parametrize(
    ("heard", "some_of"),
    [
        ("how are you", ["well", "wonderful"]),
        ("how're you today", ["well", "wonderful"]),
        ("who made you", ["picture"]),
        ("are you a robot", ["picture"]),
        ("what can you do", ["joke"]),
        ("thank you very much", ["welcome", "pleasure", "Any time"]),
        ("goodbye", ["Goodbye", "See you", "Bye"]),
        ("hello", ["Hello", "Good morning", "Hi"]),
        ("what do you like", ["storms", "old maps", "tea"]),
        ("can you hear me", ["hear", "listening", "clear"]),
        ("i am so tired", ["sorry", "hard"]),
        ("the wind blew my hat into the river", ["your hat into the river"]),
    ],
)
def test_answers_hold_one_of(heard: str, some_of: list[str]) -> None:
    answer = mira().reply(heard, NOW)
    assert any(piece in answer for piece in some_of), answer


def test_it_remembers_who_it_talks_to() -> None:
    persona = mira()
    assert "told me" in persona.reply("what is my name", NOW)
    assert "Anna" in persona.reply("anna", NOW), "a bare answer to the question it asked"
    persona.reply("I really like cold rivers", NOW)
    persona.reply("I am from Bristol", NOW)
    assert "Anna" in persona.reply("What is my name?", NOW)
    about = persona.reply("what do you know about me", NOW)
    assert "Anna" in about
    assert "cold rivers" in about
    assert "bristol" in about.lower()


def test_it_repeats_itself_when_asked_and_tells_another_joke() -> None:
    persona = mira()
    first = persona.reply("what is your favorite color", NOW)
    assert persona.reply("can you repeat that", NOW) == first
    jokes = {persona.reply("tell me a joke", NOW), persona.reply("tell me another one", NOW)}
    assert len(jokes) == 2


def test_yes_is_no_hobby() -> None:
    persona = mira()
    persona.reply("what do you know about me", NOW)
    assert "yes" not in persona.reply("yes", NOW).lower()


def test_the_wording_varies_and_is_seeded() -> None:
    def answers(seed: int) -> list[str]:
        persona = mira(seed)
        return [persona.reply("what is your name", NOW) for _ in range(3)]

    assert answers(4) == answers(4)
    assert len({answer[:12] for answer in answers(4)}) >= 2


def test_it_asks_back_now_and_then_but_not_always() -> None:
    persona = mira()
    questions = sum(
        persona.reply("what is your favorite color", NOW).endswith("?") for _ in range(30)
    )
    assert 3 <= questions <= 15


def test_greetings() -> None:
    greeting = mira().greeting(NOW)
    assert greeting == "Good morning, I'm Mira. Lovely to meet you."
    ahoy = Persona("Bo", "Well, ahoy there! I'm Bo.", {}, [], "")
    assert ScriptedPersona(ahoy, 1).greeting(NOW) == "Well, ahoy there! I'm Bo."
    plain = Persona("Bo", "My name is Bo. It is {time_of_day}.", {}, [], "")
    assert ScriptedPersona(plain, 1).greeting(NOW) == (
        "Good morning. My name is Bo. It is morning."
    )
    assert "Good evening" in ScriptedPersona(BARE, 1).greeting(datetime(2026, 1, 1, 22, 0))
    assert "Robin" in ScriptedPersona(BARE, 1).greeting(NOW)


def test_a_persona_without_facts_invents_none() -> None:
    persona = ScriptedPersona(BARE, 2)
    for question in ("how old are you", "where do you live", "what is your job", "what do you eat"):
        answer = persona.reply(question, NOW)
        assert answer
        assert "None" not in answer


def test_a_long_fact_is_cut_to_what_one_listens_to() -> None:
    persona = ScriptedPersona(
        Persona(
            "Bo", "", {"job": "I sort stones. " + "They are many and round and old. " * 30}, [], ""
        ),
        1,
    )
    assert len(persona.reply("what is your job", NOW).split()) <= MAX_WORDS + 8


_VOCABULARY = (
    "what is your name my like i you the of are how old tell me joke favorite color peter zebra "
    "seven plus times two hundred and by divided yes no who when repeat live in from dog 12 0:"
)
_WORDS = st.sampled_from(_VOCABULARY.split())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(_WORDS, st.text(max_size=8)), max_size=30), st.integers(0, 9))
def test_no_answer_is_empty_or_long(words: list[str], seed: int) -> None:
    persona = mira(seed)
    for _ in range(2):
        answer = persona.reply(" ".join(words), NOW)
        assert any(character.isalnum() for character in answer)
        assert len(answer.split()) <= MAX_WORDS
        assert not any(character.isdigit() for character in answer)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (21, "twenty-one"),
        (100, "one hundred"),
        (1005, "one thousand and five"),
        (123456, "one hundred and twenty-three thousand four hundred and fifty-six"),
        (-7, "minus seven"),
    ],
)
def test_numbers(number: int, words: str) -> None:
    assert number_words(number) == words


@given(st.integers(0, 10**12 - 1))
def test_numbers_read_back(number: int) -> None:
    assert parse_number(number_words(number).replace("-", " ").split()) == number


def test_ordinals_times_dates() -> None:
    assert [ordinal_words(n) for n in (1, 12, 20, 22, 31)] == [
        "first",
        "twelfth",
        "twentieth",
        "twenty-second",
        "thirty-first",
    ]
    assert time_words(datetime(2026, 1, 1, 0, 0)) == "twelve o'clock in the morning"
    assert time_words(datetime(2026, 1, 1, 19, 45)) == "seven forty-five in the evening"
    assert date_words(NOW) == "Sunday, March twenty-second"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("what is two plus two", "Two plus two is four."),
        ("what is to plus for", "Two plus four is six."),
        ("nine minus twelve", "Nine minus twelve is minus three."),
        ("12 * 12", "Twelve times twelve is one hundred and forty-four."),
        ("ten divided by three", "Ten divided by three is about three point three three."),
        ("five divided by zero", "Nothing can be divided by zero, not even by me."),
        ("one hundred and five minus five", "One hundred and five minus five is one hundred."),
        ("three and four", "Three and four".replace("and", "plus") + " is seven."),
        ("we walked for over two hours", None),
        ("you and me", None),
        ("two hundred and five", None),
        ("", None),
    ],
)
def test_sums(text: str, answer: str | None) -> None:
    assert solve(text) == answer
