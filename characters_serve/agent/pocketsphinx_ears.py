"""In: 16 kHz int16 PCM of one turn. Out: its words, by pocketsphinx. Knows no turns, no persona.

Two decoders hear each turn: one with an open language model, one that knows only the phrases that
the scripted persona understands. Where both hear about the same sounds, the phrase is believed:
"canadian" was "who made you", "come out" was "hello".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from characters_serve.agent.understanding import is_clear, known_phrases

# The decoder holds the interpreter's lock for a whole call (0.66 s seen for 4 s of speech on a busy
# machine), so a late turn is caught up in pieces of 32 ms and the event loop gets in between.
_PIECE_BYTES = 1024
# What may be decoded twice: six seconds of speech take one second of a core.
_AGAIN_BYTES = 6 * 32_000

_DIGITS = "one two three four five six seven eight nine"
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SUM = re.compile(r"what is .+ (?:plus|minus|times|divided by) .+")


# Frames by which a phrase may fall short of the open words, and acoustic score it may lack. Words
# that fit badly get stretched into the silence around them, hence the wider edge where the phrase
# is far likelier. Chosen on 264 sentences in six synthetic voices: of 156 known phrases 120 come
# out exactly right instead of 83, none got worse, and 2 of 108 others were taken for a phrase.
_ALIKE = (10, 60.0)
_STRETCHED = (35, 100.0)
_CLEAR_GAIN = 0.0016


@dataclass(frozen=True)
class Hearing:
    """What one decoder made of a turn. Scores are logarithms; frames are 10 ms."""

    words: str
    score: float
    acoustic: float
    first_frame: int
    last_frame: int
    num_frames: int


class PocketsphinxEars:
    """Decodes while the user speaks: 0.12 of real time, and 0.03-0.05 for the phrases.

    The end of a turn takes 10-20 ms more (fwdflat, a second pass over it, would make that up to
    700 ms; a lattice of the phrases, which rescores nothing, 15-70 ms). It is worked out at the
    first pause. If the user goes on after all, a short turn is decoded again from its beginning.
    """

    description = "pocketsphinx (small; clear, simple English works best)"
    niceness = 0
    pause_s = 0.192  # what is said after it has to be decoded from the turn's beginning

    def __init__(self) -> None:
        from pocketsphinx import Decoder

        # The pruning takes 0.16 of real time to 0.12 with as many words right (77 % of 66 sentences
        # in three voices); at 1500 and 5 it is 72 %.
        self._open = Decoder(
            samprate=16_000,
            fwdflat=False,
            bestpath=True,
            maxhmmpf=3000,
            maxwpf=10,
            loglevel="FATAL",
        )
        phrases = [
            phrase
            for phrase in known_phrases()
            if all(self._open.lookup_word(word) for word in phrase.split())
        ]
        self._phrases = frozenset(phrases)
        # 22 MB more, since the language model is the large part.
        self._known = Decoder(samprate=16_000, lm=None, bestpath=False, loglevel="FATAL")
        self._known.add_jsgf_string("phrases", grammar(phrases))
        self._known.activate_search("phrases")
        self._decoding = False
        self._pcm = bytearray()
        self._final = ""

    @property
    def settled(self) -> bool:
        return not self._decoding

    def begin(self) -> None:
        self._pcm.clear()
        self._start()

    def feed(self, pcm_16k: bytes) -> str:
        if not self._decoding:
            self._start()
            self._decode(bytes(self._pcm))
        self._pcm += pcm_16k
        self._decode(pcm_16k)
        return self._words()

    def pause(self) -> str:
        if len(self._pcm) > _AGAIN_BYTES:
            return self._words()
        return self.finish()

    def finish(self) -> str:
        if self._decoding:
            self._decoding = False
            self._open.end_utt()
            self._known.end_utt()
            heard, known = _hearing(self._open), _hearing(self._known)
            self._final = choose(heard, known if known and self._complete(known.words) else None)
        return self._final

    def _start(self) -> None:
        for decoder in (self._open, self._known):
            if self._decoding:
                decoder.end_utt()
            decoder.start_utt()
        self._decoding = True

    def _decode(self, pcm_16k: bytes) -> None:
        for offset in range(0, len(pcm_16k), _PIECE_BYTES):
            piece = pcm_16k[offset : offset + _PIECE_BYTES]
            self._open.process_raw(piece, False, False)
            self._known.process_raw(piece, False, False)

    def _complete(self, words: str) -> bool:
        return words in self._phrases or _SUM.fullmatch(words) is not None

    def _words(self) -> str:
        hypothesis = self._open.hyp()
        return str(hypothesis.hypstr).strip() if hypothesis is not None else ""


def choose(heard: Hearing | None, known: Hearing | None) -> str:
    """The phrase, where its sounds fit as well as the open words do and cover the same stretch."""
    if heard is None or known is None or is_clear(heard.words):
        return heard.words if heard else ""
    gain = (known.score - heard.score) / heard.num_frames
    edge, slack = _STRETCHED if gain >= _CLEAR_GAIN else _ALIKE
    covers = (
        known.first_frame <= heard.first_frame + edge
        and known.last_frame >= heard.last_frame - edge
    )
    fits = known.acoustic >= heard.acoustic - slack
    return known.words if gain >= 0 and covers and fits else heard.words


def grammar(phrases: Sequence[str]) -> str:
    """One JSGF rule of all phrases and of sums of two numbers below a hundred."""

    def either(words: str) -> str:
        return " | ".join(words.split())

    sums = "what is <number> (plus | minus | times | divided by) <number>"
    return (
        "#JSGF V1.0;\ngrammar phrases;\n"
        f"public <phrase> = {' | '.join([*phrases, sums])};\n"
        f"<digit> = {either(_DIGITS)};\n"
        f"<number> = <digit> | {either(_TEENS)} | ({either(_TENS)}) [<digit>];\n"
    )


def _hearing(decoder: Any) -> Hearing | None:
    hypothesis = decoder.hyp()
    if hypothesis is None or not hypothesis.hypstr:
        return None
    words = [segment for segment in decoder.seg() if segment.word[0] not in "<["]
    if not words:
        return None
    return Hearing(
        words=str(hypothesis.hypstr).strip(),
        score=_log(hypothesis.score),
        acoustic=sum(_log(segment.ascore) for segment in words),
        first_frame=words[0].start_frame,
        last_frame=words[-1].end_frame,
        num_frames=max(1, decoder.n_frames()),
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -1e4
