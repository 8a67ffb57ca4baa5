"""In: `VideoChunk`s as they arrive. Out: a picture for each video slot, samples for each packet.

Pure policy on the media time line. Every slot is decided once, when either track first needs it,
and both tracks read that decision: the next frame with its samples, or a hold (the last picture and
silence). So a late chunk shifts picture and voice by the same amount and neither clock stops.
Knows nothing of WebRTC, the engine or real time.

Lag needs no cutting to go away: steps are handed out on credit, so after a late chunk the buffer
refills to its target and never past it, and a lower target just withholds one credit. While the
character speaks, and as soon as it may, the buffer is kept full, because a hold would be heard.
While it idles, steps are handed out as late as the engine's own latency allows, because all that is
handed out then delays the first word of the next turn: a step that has begun cannot be taken back
without a jump of the picture, one that has not is free to carry speech. That word's step is handed
out at once, and the silence before it plays in half its time, but for what lasts until the word is
due: a nod is quicker for a moment. So are lips that an interruption has silenced.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from characters_serve.messages import VideoChunk
from characters_serve.session.clock import AUDIO_RATE, PACKET_SAMPLES

Pcm = NDArray[np.int16]

MAX_TARGET_CHUNKS: Final = 4
CUT_FADE_SAMPLES: Final = 240  # 5 ms
MUTE_FADE_SAMPLES: Final = 480  # 10 ms
RAISE_WINDOW_S: Final = 30
LOWER_AFTER_S: Final = 60
AUDIBLE: Final = 328  # 1 % of full scale
# Speech is certain 0.1 s after it is likely; a browser that mutes at once has not played
# what was sent in the last 0.1 s.
WAIT_S: Final = 0.25
REPLAYED_S: Final = 0.125
LATENCIES_KEPT: Final = 32  # five seconds
LATENCIES_NEEDED: Final = 8
# An idle hold is one picture shown a little longer. The margin over the engine's usual latency
# rises with each and falls while there are none: where latencies vary, two holds a minute.
USUAL_SHARE: Final = 0.9
MIN_MARGIN_S: Final = 0.02
FIRST_MARGIN_S: Final = 0.04
MAX_MARGIN_S: Final = 0.08
MARGIN_RISE_S: Final = 0.02
MARGIN_FALL_PER_S: Final = 0.0007
# By how much more than its target is in hand when idling has just handed out a step; words need not
# wait until it is less.
FIRST_WORDS_CHUNKS: Final = 1
# Speech in hand falls this much below its target between two steps, and no further.
HURRY_CHUNKS: Final = 0.5

_CUT_FADE: Final = np.linspace(1.0, 0.0, CUT_FADE_SAMPLES, dtype=np.float32)
_MUTE_FADE: Final = np.zeros(PACKET_SAMPLES, np.float32)
_MUTE_FADE[:MUTE_FADE_SAMPLES] = np.linspace(1.0, 0.0, MUTE_FADE_SAMPLES, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PlayoutEvent:
    """started, and finished or interrupted: once each. voiced: the first audible sample.

    resumed: each time that a wait ended without an interruption.
    """

    kind: Literal["started", "voiced", "finished", "interrupted", "resumed"]
    utterance_id: int
    played_ms: float


@dataclass(slots=True)
class _Slot:
    """What one video slot shows and sounds like. speech_end: samples of it that are speech."""

    frame: bytes
    voice: Pcm
    epoch: int
    utterance_id: int = 0
    position_ms: float = 0.0
    speech_end: int = 0
    closes: bool = False
    held: bool = False
    chunk_index: int = -1

    @property
    def is_silent(self) -> bool:
        return self.utterance_id == 0 and not self.voice.any()


class Playout:
    def __init__(self, *, fps: int, voice_samples_per_chunk: int, target_chunks: int) -> None:
        if AUDIO_RATE % fps:
            raise ValueError(f"model.fps must divide {AUDIO_RATE}")
        self.target = target_chunks
        self.underruns = 0
        self.held_slots = 0
        self.silent_slots = 0
        self.rejected_chunks = 0
        self.playing = False
        self.in_flight = 0
        self.speaking = False
        self._base_target = target_chunks
        self._fps = fps
        self._slot_samples = AUDIO_RATE // fps
        self._chunk_samples = voice_samples_per_chunk
        self._chunk_s = voice_samples_per_chunk / AUDIO_RATE
        self._sent_s: deque[float] = deque()
        self._due_slots: deque[float] = deque()  # by which what is in flight is usually here
        self._words_come = False  # an utterance's first words are in flight
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._margin_s = FIRST_MARGIN_S
        self._epoch = 0
        self._expected_index = 0
        self._buffer: deque[_Slot] = deque()
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0
        self._last = _Slot(b"", np.zeros(self._slot_samples, np.int16), epoch=0)
        self._held_run = 0
        self._waiting_slots = 0
        self._waited = False
        self._played: deque[_Slot] = deque(maxlen=math.ceil(REPLAYED_S * fps))
        self._recent_underruns: deque[int] = deque()
        self._calm_since_slot = 0
        self._packet_end = 0
        self._fading = False
        self._utterance_id = 0
        self._voiced = False
        self._played_ms = 0.0
        self._closed_through = 0
        self._events: list[PlayoutEvent] = []

    # ------------------------------------------------------------ the engine's side

    def credits(self, *, speech_waits: bool = False) -> int:
        """Steps that may be handed to the engine now. speech_waits: the next one would speak."""
        lead = float(self.target)
        if self.playing and not speech_waits:
            lead = self.lead
        elif self.playing and not self.speaking:
            lead += FIRST_WORDS_CHUNKS
        return math.ceil(lead - self._in_hand)

    @property
    def hurried(self) -> bool:
        """Whether the next words should rather come soon than take all passes: their first, whose
        silence was handed out as late as chunks with few passes allow, and those that follow
        until speech has all that it keeps in hand."""
        return self.playing and (not self.speaking or self._in_hand < self.target - HURRY_CHUNKS)

    @property
    def lead(self) -> float:
        """Least that is handed out, in chunks from the present picture on, a step's included."""
        if self.speaking:
            return float(self.target)
        return min(float(self.target), (self._usual_s + self._margin_s) / self._chunk_s)

    @property
    def _usual_s(self) -> float:
        """What nearly all steps of silence take until their chunk is here; not known: infinite."""
        if len(self._latencies_s) < LATENCIES_NEEDED:
            return math.inf
        return sorted(self._latencies_s)[math.floor(USUAL_SHARE * (len(self._latencies_s) - 1))]

    @property
    def depth(self) -> float:
        """Chunks that have come, the rest of the one that plays included."""
        return len(self._buffer) * self._slot_samples / self._chunk_samples

    @property
    def _in_hand(self) -> float:
        """Chunks from the present picture to the end of what is handed out."""
        return self.depth + self.in_flight

    @property
    def held_s(self) -> float:
        """How long the present hold has lasted; 0 while content plays."""
        return self._held_run / self._fps

    @property
    def utterance_id(self) -> int:
        """The utterance that sounds now, or 0."""
        return self._utterance_id

    @property
    def chunk_index(self) -> int:
        """Of the last slot decided; -1 before the first."""
        return self._last.chunk_index

    @property
    def in_speech(self) -> bool:
        """Whether a hold after the last slot decided would be heard."""
        slot = self._last
        return slot.utterance_id != 0 and not slot.closes and slot.epoch >= self._epoch

    @property
    def position_ms(self) -> float:
        return self._played_ms

    @property
    def can_start(self) -> bool:
        return not self.playing and math.ceil(self.depth) >= min(self.target, self._base_target)

    def step_sent(self, now_s: float, *, speaking: bool) -> None:
        """speaking: more of the same utterance follows this step."""
        self.in_flight += 1
        self._words_come |= speaking and not self.speaking
        self.speaking = speaking
        self._due_slots.append(self._next_slot + self._usual_s * self._fps)
        self._sent_s.append(now_s)

    def push(self, chunk: VideoChunk, now_s: float) -> bool:
        """Takes the next chunk; one that is not the next (a duplicate, a stray) is refused."""
        if chunk.chunk_index != self._expected_index or not self.in_flight:
            self.rejected_chunks += 1
            return False
        voice = np.frombuffer(chunk.voice_48k, np.int16)
        if len(voice) != len(chunk.frames_i420) * self._slot_samples or not len(voice):
            raise ValueError(
                f"chunk {chunk.chunk_index}: {len(voice)} samples "
                f"for {len(chunk.frames_i420)} frames"
            )
        self._expected_index += 1
        self.in_flight -= 1
        self._due_slots.popleft()
        sent_s = self._sent_s.popleft()
        # Steps of speech wait behind each other for a full buffer: that is no measure of idling.
        if not chunk.utterance_id:
            self._latencies_s.append(now_s - sent_s)
        self._buffer.extend(self._cut(chunk, voice))
        return True

    def interrupt(self, epoch: int, through_utterance_id: int) -> None:
        """Silences all speech of older epochs from the next packet on; the picture goes on, in half
        its time, so that the mouth is at rest soon.

        Every utterance up to `through_utterance_id` that has not ended is reported interrupted.
        """
        self._epoch = epoch
        self.speaking = False
        self._words_come = False
        self._waiting_slots = 0
        self._played.clear()
        # A second interruption before the next packet must not turn the fade into a cut; and of a
        # slot before a wait, the end and its fade may not have been handed out yet.
        upcoming = self._slots.get(self._packet_end // self._slot_samples)
        silent = self._waited if upcoming is None else upcoming.held
        sounds = self._utterance_id != 0 and not silent
        self._fading = self.playing and (self._fading or sounds)
        for utterance_id in range(self._closed_through + 1, through_utterance_id + 1):
            played_ms = self._played_ms if utterance_id == self._utterance_id else 0.0
            self._events.append(PlayoutEvent("interrupted", utterance_id, played_ms))
        self._closed_through = max(self._closed_through, through_utterance_id)
        self._utterance_id = 0

    def wait(self) -> bool:
        """The user may be speaking: content waits for an interruption, WAIT_S at most.

        Without one it goes on from a little before, so that no sample of it is lost to a client
        that fell silent at once. False where nothing is spoken that could wait.
        """
        if not self.playing or not self.in_speech or self._waiting_slots or self._held_run:
            return False
        self._waiting_slots = math.ceil(WAIT_S * self._fps)
        return True

    def take_events(self) -> list[PlayoutEvent]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ the tracks' side

    def start(self, slot: int) -> None:
        """Content plays from this slot on."""
        self.playing = True
        self._slots.clear()
        self._next_slot = slot
        self._recent_underruns.clear()
        self._calm_since_slot = slot

    def pause(self) -> None:
        """Nobody listens: content stays where it is until the next start."""
        self.playing = False
        self._slots.clear()
        self._held_run = 0
        self._waiting_slots = 0
        self._fading = False

    def skip_to(self, slot: int) -> None:
        """Slots that passed undecided (this process was stalled) are gone; content is not."""
        self._next_slot = max(self._next_slot, slot)

    def picture(self, slot: int) -> bytes:
        self._decide_through(slot)
        return self._slots[slot].frame if slot in self._slots else self._last.frame

    def packet(self, index: int) -> Pcm:
        """960 samples; a cut within 5 ms after them is faded already."""
        begin = index * PACKET_SAMPLES
        end = begin + PACKET_SAMPLES
        if begin > self._packet_end:
            self._pass_over(begin // self._slot_samples)
        self._packet_end = end
        self._decide_through((end + CUT_FADE_SAMPLES - 1) // self._slot_samples)
        packet = np.zeros(PACKET_SAMPLES, np.int16)
        for number in range(begin // self._slot_samples, (end - 1) // self._slot_samples + 1):
            slot = self._slots.get(number)
            if slot is None or slot.held:
                continue
            slot_begin = number * self._slot_samples
            first = max(begin, slot_begin) - slot_begin
            after = min(end, slot_begin + self._slot_samples) - slot_begin
            at = slot_begin + first - begin
            piece = slot.voice[first:after]
            if slot.epoch >= self._epoch:
                packet[at : at + len(piece)] = piece
                self._follow(slot, after, piece)
            elif self._fading:
                packet[at : at + len(piece)] = piece * _MUTE_FADE[at : at + len(piece)]
        self._fading = False
        self._forget(begin // self._slot_samples)
        return packet

    # ------------------------------------------------------------ decisions

    def _decide_through(self, slot: int) -> None:
        while self.playing and self._next_slot <= slot:
            self._slots[self._next_slot] = self._decide(self._next_slot)
            self._next_slot += 1

    def _decide(self, number: int) -> _Slot:
        if self._waiting_slots:
            return self._wait_on(number)
        if self._buffer:
            if self._hurries(number):
                self._buffer.popleft()
            slot = self._buffer.popleft()
            if self._held_run or self._waited:
                fade_in = 1.0 - _CUT_FADE
                slot.voice[:CUT_FADE_SAMPLES] = slot.voice[:CUT_FADE_SAMPLES] * fade_in
            self._held_run = 0
            self._waited = False
            self._words_come &= slot.utterance_id == 0
            self._last = slot
            self._played.append(slot)
            self._margin_s = max(MIN_MARGIN_S, self._margin_s - MARGIN_FALL_PER_S / self._fps)
            if number - self._calm_since_slot >= LOWER_AFTER_S * self._fps:
                self.target = max(self._base_target, self.target - 1)
                self._calm_since_slot = number
            return slot
        if not self._held_run:
            self._underrun(number)
        self._held_run += 1
        self.held_slots += 1
        self.silent_slots += self.in_speech
        return _Slot(self._last.frame, self._last.voice, epoch=self._epoch, held=True)

    def _wait_on(self, number: int) -> _Slot:
        """One slot of the wait; the last puts back what is played again."""
        last = self._last
        if not self._waited:
            faded = replace(last, voice=last.voice.copy())
            faded.voice[-CUT_FADE_SAMPLES:] = faded.voice[-CUT_FADE_SAMPLES:] * _CUT_FADE
            self._slots[number - 1] = faded  # not sent yet: packets look 5 ms ahead for this
            self._waited = True
        self._waiting_slots -= 1
        if not self._waiting_slots:
            spoken = [slot for slot in self._played if slot.utterance_id == last.utterance_id]
            again = [replace(slot, voice=slot.voice.copy()) for slot in spoken]
            self._buffer.extendleft(reversed(again))
            self._played.clear()
            self._events.append(PlayoutEvent("resumed", last.utterance_id, self._played_ms))
        return _Slot(last.frame, last.voice, epoch=self._epoch, held=True)

    def _underrun(self, number: int) -> None:
        self.underruns += 1
        # Not sent yet: packets look 5 ms ahead for this.
        tail = self._last.voice[-CUT_FADE_SAMPLES:]
        tail[:] = tail * _CUT_FADE
        self._calm_since_slot = number
        if not self.in_speech:
            if not self._words_come and not self._silenced(self._last):
                self._margin_s = min(MAX_MARGIN_S, self._margin_s + MARGIN_RISE_S)
            return
        self._recent_underruns.append(number)
        while self._recent_underruns[0] < number - RAISE_WINDOW_S * self._fps:
            self._recent_underruns.popleft()
        if len(self._recent_underruns) >= 2:
            self.target = min(MAX_TARGET_CHUNKS, self.target + 1)
            self._recent_underruns.clear()

    def _follow(self, slot: _Slot, after: int, piece: Pcm) -> None:
        """Reports where the speech is once the slot's samples up to `after` are handed out."""
        if slot.utterance_id <= self._closed_through:
            return
        if slot.utterance_id != self._utterance_id:
            if self._utterance_id:
                self._finish()
            self._utterance_id = slot.utterance_id
            self._voiced = False
            self._events.append(PlayoutEvent("started", slot.utterance_id, slot.position_ms))
        self._played_ms = slot.position_ms + min(after, slot.speech_end) * 1000.0 / AUDIO_RATE
        if not self._voiced and len(piece) and np.abs(piece.astype(np.int32)).max() > AUDIBLE:
            self._voiced = True
            self._events.append(PlayoutEvent("voiced", slot.utterance_id, self._played_ms))
        if slot.closes and after >= slot.speech_end:
            self._finish()

    def _finish(self) -> None:
        self._events.append(PlayoutEvent("finished", self._utterance_id, self._played_ms))
        self._closed_through = self._utterance_id
        self._utterance_id = 0

    def _pass_over(self, before: int) -> None:
        """Packets were skipped: what ended within them has ended."""
        for number in sorted(n for n in self._slots if n < before):
            slot = self._slots[number]
            if slot.closes and slot.epoch >= self._epoch:
                self._follow(slot, self._slot_samples, slot.voice[:0])

    def _silenced(self, slot: _Slot) -> bool:
        return slot.utterance_id != 0 and slot.epoch < self._epoch

    def _hurries(self, number: int) -> bool:
        """Whether the next picture is left out: words come sooner then, or a mouth that was
        silenced is at rest sooner."""
        if len(self._buffer) < 2 or self._fading:
            return False
        silenced = self._silenced(self._buffer[0])
        if not (silenced or self._buffer[0].is_silent):
            return False
        if any(slot.utterance_id and slot.epoch >= self._epoch for slot in self._buffer):
            return True
        due = self._due_slots[0] if self._due_slots else number
        return (silenced or self._words_come) and number + len(self._buffer) > due

    def _cut(self, chunk: VideoChunk, voice: Pcm) -> list[_Slot]:
        size = self._slot_samples
        speech_end = len(voice)
        if chunk.last:
            audible = np.flatnonzero(voice)
            speech_end = int(audible[-1]) + 1 if len(audible) else 0
        closing = max(0, (speech_end - 1) // size)
        slots = []
        for index, frame in enumerate(chunk.frames_i420):
            spoken = chunk.utterance_id if not chunk.last or index <= closing else 0
            slots.append(
                _Slot(
                    frame=frame,
                    voice=voice[index * size : (index + 1) * size].copy(),
                    epoch=chunk.epoch,
                    utterance_id=spoken,
                    position_ms=chunk.utterance_offset_ms + index * size * 1000.0 / AUDIO_RATE,
                    speech_end=max(0, min(size, speech_end - index * size)),
                    closes=chunk.last and index == closing,
                    chunk_index=chunk.chunk_index,
                )
            )
        return slots

    def _forget(self, before: int) -> None:
        """Drops slots that audio has passed; video may be a little behind it."""
        for number in [n for n in self._slots if n < before - self._fps]:
            del self._slots[number]
