"""In: one speech probability for each hop of the VAD. Out: turn events. Knows no audio, model or
clock.

Time is counted in hops of microphone audio, so a late or bursty network changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto


class TurnEvent(Enum):
    STARTED = auto()
    BARGE_IN = auto()
    PAUSED = auto()
    RESUMED = auto()
    LIKELY_OVER = auto()  # an answer may be on its way; RESUMED takes it back
    ENDED = auto()
    DISCARDED = auto()  # too short to be speech: a click, a cough


@dataclass(frozen=True)
class TurnRules:
    """Two thresholds make the hysteresis; a third, higher one counts while the character talks.

    Echo that the browser's canceller leaves behind scores well below near speech, so over the
    character's own voice only the higher threshold starts a turn or a barge-in.
    """

    end_silence_s: float
    barge_in_s: float
    hop_s: float
    start_probability: float = 0.5
    start_probability_over_voice: float = 0.7
    stop_probability: float = 0.35
    start_s: float = 0.032
    pause_s: float = 0.096
    min_speech_s: float = 0.16
    max_turn_s: float = 30.0


class TurnDetector:
    """Follows one user's turns. `step` takes each hop's probability and says what changed."""

    def __init__(self, rules: TurnRules) -> None:
        self._rules = rules
        self.in_turn = False
        self.paused = False
        self.likely_over = False
        self.speech_s = 0.0
        self.silence_s = 0.0
        self._end_silence_s = rules.end_silence_s
        self._likely_silence_s = math.inf
        self._run_s = 0.0
        self._loud_s = 0.0
        self._turn_s = 0.0
        self._barged_in = False

    def end_after(self, silence_s: float, likely_after_s: float = math.inf) -> None:
        """What was said tells how long the present silence must last to end the turn, and, where
        it can be answered ahead, how long before that is likely enough."""
        self._end_silence_s = silence_s
        self._likely_silence_s = likely_after_s

    def step(self, probability: float, character_speaking: bool) -> list[TurnEvent]:
        rules = self._rules
        # An answer that is still on its way has no echo yet.
        echo = character_speaking and not self.likely_over
        start = rules.start_probability_over_voice if echo else rules.start_probability
        if not character_speaking:
            self._loud_s = 0.0
            self._barged_in = False
        elif probability >= start:
            self._loud_s += rules.hop_s
        elif probability < rules.stop_probability:
            self._loud_s = 0.0
        events = (
            self._inside(probability, start) if self.in_turn else self._outside(probability, start)
        )
        if (
            self.in_turn
            and character_speaking
            and not self._barged_in
            and self._loud_s >= rules.barge_in_s - 1e-9
        ):
            self._barged_in = True
            events.append(TurnEvent.BARGE_IN)
        return events

    def _outside(self, probability: float, start: float) -> list[TurnEvent]:
        if probability >= start:
            self._run_s += self._rules.hop_s
        elif probability < self._rules.stop_probability:
            self._run_s = 0.0
        if self._run_s < self._rules.start_s - 1e-9:
            return []
        self.in_turn = True
        self.paused = False
        self.speech_s = self._turn_s = self._run_s
        self._speech_goes_on()
        return [TurnEvent.STARTED]

    def _inside(self, probability: float, start: float) -> list[TurnEvent]:
        rules = self._rules
        self._turn_s += rules.hop_s
        # Once paused, only a fresh onset resumes: noise between the thresholds must not.
        voiced = probability >= (start if self.paused else rules.stop_probability)
        if voiced:
            self.speech_s += rules.hop_s
            self._speech_goes_on()
            if self._turn_s >= rules.max_turn_s:
                return [self._end()]
            if self.paused:
                self.paused = False
                return [TurnEvent.RESUMED]
            return []
        self.silence_s += rules.hop_s
        if self.silence_s >= self._end_silence_s - 1e-9:
            return [self._end()]
        if not self.paused and self.silence_s >= rules.pause_s - 1e-9:
            self.paused = True
            return [TurnEvent.PAUSED]
        if not self.likely_over and self.silence_s >= self._likely_silence_s - 1e-9:
            self.likely_over = self._is_speech
            return [TurnEvent.LIKELY_OVER] if self.likely_over else []
        return []

    def _speech_goes_on(self) -> None:
        self.silence_s = 0.0
        self.likely_over = False
        self._end_silence_s = self._rules.end_silence_s
        self._likely_silence_s = math.inf

    @property
    def _is_speech(self) -> bool:
        return self.speech_s >= self._rules.min_speech_s - 1e-9

    def _end(self) -> TurnEvent:
        self.in_turn = False
        self.likely_over = False
        self._run_s = 0.0
        return TurnEvent.ENDED if self._is_speech else TurnEvent.DISCARDED
