"""In: microphone PCM, playout reports. Out: speech, transcripts, timings. Knows no socket.

The local agent: VAD and turns on the event loop, recognition and synthesis each on a thread of its
own, a reply from the scripted persona or a chat endpoint, spoken sentence by sentence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Literal

from characters_serve.agent.base import AgentEvent, Emit
from characters_serve.agent.chat import HISTORY_LINES, Chat, ChatFailed
from characters_serve.agent.ears import Ears, load_ears, yield_cores
from characters_serve.agent.endings import silence_to_end
from characters_serve.agent.history import History, SpokenSentence, Utterance
from characters_serve.agent.persona import ScriptedPersona
from characters_serve.agent.sentences import split_sentences
from characters_serve.agent.smart_turn import WHEEL, WINDOW_S, SmartTurn, find_smart_turn
from characters_serve.agent.turns import TurnDetector, TurnEvent, TurnRules
from characters_serve.agent.vad import HOP_S, HOP_SAMPLES, RATE, HalfStepVad
from characters_serve.agent.voice import Voice, load_voice
from characters_serve.config import AgentConfig, ConfigError
from characters_serve.messages import (
    AgentAudio,
    AgentError,
    AgentStart,
    AgentStarted,
    Playback,
    ToolResult,
    Transcript,
    TurnTiming,
    UserSpeech,
)

log = logging.getLogger(__name__)

PIECE_S = 0.12
PAUSE_S = 0.12
# Audio kept from before a turn is certain: its onset, and the consonant before the VAD noticed.
_PREROLL_S = 0.32
# Voiced time without a recognised word after which the user is told; shorter is taken for noise.
_PARDON_SPEECH_S = 0.6
# An answer may leave so long before the wait for more is over: its way to the user's ear takes
# longer, and who goes on meanwhile takes it back unheard.
_AHEAD_S = 0.2
# So long at most an answer's second sentence waits until its first is heard: the pictures of that
# need the cores more.
_FIRST_WORDS_S = 0.4
# A microphone that sends nothing for this long in the middle of a turn was muted or cut off.
_MICROPHONE_GONE_S = 1.0


@dataclass
class LocalModels:
    """Loaded once for each process; a session resets them."""

    vad: HalfStepVad
    ears: Ears
    voice: Voice
    smart_turn: SmartTurn | None


def load_models(config: AgentConfig) -> LocalModels:
    """Raises ConfigError when something that is asked for by name cannot be had."""
    return LocalModels(
        HalfStepVad(), load_ears(config), load_voice(config.voice), load_smart_turn(config)
    )


def load_smart_turn(config: AgentConfig) -> SmartTurn | None:
    if config.end_of_turn == "words":
        return None
    model = find_smart_turn()
    if model is not None:
        return SmartTurn(model)
    if config.end_of_turn == "melody":
        raise ConfigError(f"agent.end_of_turn: melody needs the model in {WHEEL}")
    log.info("the end of a turn is told by its words alone: %s is not installed", WHEEL)
    return None


@dataclass
class TurnClock:
    """Stamps of one turn, in milliseconds from the end of the user's speech."""

    speech_end_s: float
    stages_ms: dict[str, float] = field(default_factory=dict)

    def stamp(self, stage: str, now_s: float) -> None:
        self.stages_ms.setdefault(stage, round((now_s - self.speech_end_s) * 1000, 1))


@dataclass(eq=False)
class Job:
    """One utterance to be: fixed text, or an answer to what the user said."""

    utterance: Utterance
    text: str
    answers: bool
    turn: TurnClock | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Hear:
    """One order to the recogniser's thread."""

    kind: Literal["begin", "feed", "pause", "finish", "discard"]
    pcm: bytes = b""
    speech_s: float = 0.0
    turn: TurnClock | None = None
    pause: Pause | None = None


@dataclass(eq=False)
class Pause:
    """What is found out about one pause of the user: final words, and how likely the turn is over.

    judged: no melody is waited for any more.
    """

    judged: bool
    words: str | None = None
    settled: bool = False
    over: float | None = None


@dataclass(frozen=True)
class Ahead:
    """An answer that left before the turn was over, and what was unanswered before it."""

    words: str
    unanswered: str
    job: Job


class LocalAgent:
    """One session. See `base.Agent` for the calls."""

    def __init__(
        self,
        models: LocalModels,
        config: AgentConfig,
        start: AgentStart,
        emit: Emit,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        calendar: Callable[[], datetime] = datetime.now,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.session_id = start.session_id
        self._models = models
        self._greet = start.greet
        self._emit_event = emit
        self._clock_s = clock_s
        self._calendar = calendar
        self._persona = ScriptedPersona(start.persona, zlib.crc32(start.session_id.encode()))
        self._english = config.language == "en"
        self._lines = config.lines
        self._chat: Chat | None = None
        if config.chat.base_url:
            self._chat = Chat(config.chat, start.persona, environment, config.language)
        self._filler_after_s = config.chat.filler_after_s
        self._end_silence_s = config.end_of_turn_silence_s
        rules = TurnRules(
            self._end_silence_s, config.barge_in_speech_s, HOP_S, pause_s=models.ears.pause_s
        )
        self._turns = TurnDetector(rules)
        self._history = History()
        self._open = False

        self._pcm = bytearray()
        self._last_pcm_s = 0.0
        self._preroll: deque[bytes] = deque(maxlen=round(_PREROLL_S / HOP_S))
        self._turn_pcm: deque[bytes] = deque(maxlen=round(WINDOW_S / HOP_S))
        self._held: list[bytes] = []
        self._hear_orders: asyncio.Queue[Hear] = asyncio.Queue()
        self._partial = ""
        self._pause: Pause | None = None
        self._judging: set[asyncio.Task[None]] = set()
        self._ahead: Ahead | None = None
        self._unanswered = ""
        self._asked_pardon = False

        self._last_id = 0
        self._last_audible_id = 0
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._waiting: list[Job] = []
        self._current: Job | None = None
        self._current_task: asyncio.Task[None] | None = None
        self._sounding: dict[int, Job] = {}

        # One thread each, so that listening never waits for speaking; each model uses one thread.
        self._listen_thread = ThreadPoolExecutor(
            1, "listen", initializer=yield_cores, initargs=(models.ears.niceness,)
        )
        self._melody_thread = ThreadPoolExecutor(1, "melody")
        self._speak_thread = ThreadPoolExecutor(1, "speak")
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ the agent's calls

    async def open(self) -> AgentStarted:
        self._models.vad.reset()
        self._open = True
        self._tasks = [
            asyncio.create_task(self._listen_all(), name="agent-listen"),
            asyncio.create_task(self._speak_all(), name="agent-speak"),
            asyncio.create_task(self._watch_microphone(), name="agent-microphone"),
        ]
        if self._greet:
            greeting = partial(self._persona.greeting, self._calendar())
            self.say(self._line(self._lines.greeting, greeting))
        return AgentStarted(
            self.session_id,
            listener=self._models.ears.description,
            voice=self._models.voice.description,
            chat=self._chat.description if self._chat else self._persona.description,
        )

    def hear(self, pcm_16k: bytes) -> None:
        self._last_pcm_s = self._clock_s()
        self._pcm += pcm_16k
        size = 2 * HOP_SAMPLES
        while len(self._pcm) >= size:
            hop = bytes(self._pcm[:size])
            del self._pcm[:size]
            # On the loop: cheaper here than a thread's hand-over.
            self._step(self._models.vad.process(hop), hop)

    def say(self, text: str) -> None:
        self._enqueue(text, answers=False, turn=None)

    def read(self, text: str) -> None:
        self._history.add_user(text)
        turn = f"{self._unanswered} {text}".strip()
        self._unanswered = ""
        self._enqueue(turn, answers=True, turn=None)

    def interrupt(self, utterance_id: int) -> None:
        self._drop_until(utterance_id)

    def playback(self, report: Playback) -> None:
        utterance = self._history.utterance(report.utterance_id)
        if utterance is None:
            return
        match report.event:
            case "started":
                if utterance.started_s is None:
                    utterance.started_s = self._clock_s()
                if job := self._sounding.get(report.utterance_id):
                    job.heard.set()
                return
            case "finished":
                utterance.played_ms = utterance.sent_ms
            case "interrupted":
                utterance.played_ms = min(report.played_ms, utterance.sent_ms)
        self._sounding.pop(report.utterance_id, None)
        self._emit(
            Transcript(self.session_id, "character", utterance.heard(), True, report.utterance_id)
        )

    def tool_result(self, result: ToolResult) -> None:
        """It calls no functions."""

    async def close(self) -> None:
        self._open = False
        tasks = [*self._tasks, *self._judging]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for thread in (self._listen_thread, self._melody_thread, self._speak_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        if self._chat:
            await self._chat.close()

    # ------------------------------------------------------------ turns

    @property
    def _character_speaking(self) -> bool:
        return bool(self._sounding or self._waiting or self._current)

    async def _watch_microphone(self) -> None:
        """Ends a turn whose microphone fell away, as silence would have."""
        while True:
            await asyncio.sleep(0.25)
            if self._turns.in_turn and self._clock_s() - self._last_pcm_s > _MICROPHONE_GONE_S:
                self.hear(bytes(2 * RATE))

    def _step(self, probability: float, hop: bytes) -> None:
        events = self._turns.step(probability, self._character_speaking)
        if TurnEvent.STARTED not in events and self._turns.in_turn:
            self._pass_on(hop, events)
        else:
            self._preroll.append(hop)
        self._turn_pcm.append(hop)
        for event in events:
            match event:
                case TurnEvent.STARTED:
                    self._turn_pcm = deque(self._preroll, self._turn_pcm.maxlen)
                    self._order(Hear("begin"))
                    self._order(Hear("feed", b"".join(self._preroll)))
                    self._preroll.clear()
                    self._emit(UserSpeech(self.session_id, speaking=True, barge_in=False))
                case TurnEvent.BARGE_IN:
                    self._emit(UserSpeech(self.session_id, speaking=True, barge_in=True))
                    self._drop_until(self._last_id, by_user=True)
                case TurnEvent.PAUSED:
                    self._begin_pause()
                case TurnEvent.RESUMED if self._ahead is not None:
                    self._take_back(self._ahead)
                case TurnEvent.LIKELY_OVER:
                    self._answer_ahead()
                case TurnEvent.ENDED | TurnEvent.DISCARDED:
                    self._end_turn(event is TurnEvent.ENDED)

    def _pass_on(self, hop: bytes, events: list[TurnEvent]) -> None:
        """To the recogniser; a pause's silence is held back, in case nothing follows it."""
        if self._turns.paused:
            self._held.append(hop)
            return
        if TurnEvent.RESUMED in events:
            self._order(Hear("feed", b"".join(self._held)))
            self._held.clear()
        self._order(Hear("feed", hop))

    def _begin_pause(self) -> None:
        melody = self._models.smart_turn
        pause = self._pause = Pause(judged=melody is None)
        self._order(Hear("pause", pause=pause))
        if melody is not None:
            judging = asyncio.create_task(self._judge(pause, melody, b"".join(self._turn_pcm)))
            self._judging.add(judging)
            judging.add_done_callback(self._judging.discard)

    async def _judge(self, pause: Pause, melody: SmartTurn, pcm: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            pause.over = await loop.run_in_executor(self._melody_thread, melody.over, pcm)
        except Exception as error:
            log.exception("the turn's melody was not understood")
            self._emit(AgentError(self.session_id, f"end of turn failed: {type(error).__name__}"))
        pause.judged = True
        self._decide(pause)

    def _decide(self, pause: Pause) -> None:
        """How long the silence must last, as soon as the words are there; the melody may follow."""
        if not self._lasts(pause) or pause.words is None:
            return
        words = pause.words if self._english else ""  # the melody alone
        wait_s = silence_to_end(words, self._end_silence_s, pause.over)
        sure = pause.judged and pause.settled and pause.words
        self._turns.end_after(wait_s, wait_s - _AHEAD_S if sure else math.inf)

    def _lasts(self, pause: Pause) -> bool:
        return pause is self._pause and self._turns.in_turn and self._turns.paused

    def _answer_ahead(self) -> None:
        assert self._pause is not None
        words = self._pause.words
        assert words
        turn = self._silence_clock()
        turn.stamp("transcript", self._clock_s())
        unanswered, self._unanswered = self._unanswered, ""
        self._asked_pardon = False
        self._emit(UserSpeech(self.session_id, speaking=False, barge_in=False))
        self._history.add_user(words)
        job = self._enqueue(f"{unanswered} {words}".strip(), answers=True, turn=turn)
        self._ahead = Ahead(words, unanswered, job)

    def _take_back(self, ahead: Ahead) -> None:
        """The user goes on, and has heard nothing of the answer yet."""
        self._ahead = None
        left = bool(ahead.job.utterance.sentences)
        self._emit(UserSpeech(self.session_id, speaking=True, barge_in=left))
        ahead.job.answers = False  # its words are still in the turn
        self._drop_until(self._last_id, by_user=True)
        self._unanswered = f"{ahead.unanswered} {self._unanswered}".strip()
        self._history.take_back_user(ahead.words)

    def _end_turn(self, heard: bool) -> None:
        self._held.clear()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._partial = ""
            self._say_heard(ahead.words)
            return
        turn = self._silence_clock()
        self._emit(UserSpeech(self.session_id, speaking=False, barge_in=False))
        self._order(Hear("finish" if heard else "discard", b"", self._turns.speech_s, turn))

    def _silence_clock(self) -> TurnClock:
        """Of a turn that is, or may be, over now."""
        now_s = self._clock_s()
        turn = TurnClock(now_s - self._turns.silence_s)
        turn.stamp("end_of_turn", now_s)
        return turn

    def _say_heard(self, words: str) -> None:
        self._emit(Transcript(self.session_id, "user", words, True, self._last_id + 1))

    def _order(self, order: Hear) -> None:
        self._hear_orders.put_nowait(order)

    async def _listen_all(self) -> None:
        """Carries the orders out one after another; falls behind gracefully by joining pieces."""
        loop = asyncio.get_running_loop()
        while True:
            orders = [await self._hear_orders.get()]
            while not self._hear_orders.empty():
                orders.append(self._hear_orders.get_nowait())
            for order in _joined(orders):
                if order.pause is not None and not self._lasts(order.pause):
                    continue  # the user has gone on already
                try:
                    words = await loop.run_in_executor(self._listen_thread, self._hear, order)
                except Exception as error:
                    log.exception("the recogniser failed")
                    self._emit(
                        AgentError(self.session_id, f"recognition failed: {type(error).__name__}")
                    )
                    words = ""
                self._heard(order, words)

    def _hear(self, order: Hear) -> str:
        ears = self._models.ears
        match order.kind:
            case "begin":
                ears.begin()
                return ""
            case "feed":
                return ears.feed(order.pcm)
            case "pause":
                return ears.pause()
            case "finish":
                return ears.finish()
            case "discard":
                return ""

    def _heard(self, order: Hear, words: str) -> None:
        if order.pause is not None:
            order.pause.words, order.pause.settled = words, self._models.ears.settled
            self._decide(order.pause)
        if order.kind in ("feed", "pause"):
            if words and words != self._partial:
                self._partial = words
                self._emit(Transcript(self.session_id, "user", words, False, self._last_id + 1))
        elif order.kind in ("finish", "discard"):
            assert order.turn is not None
            order.turn.stamp("transcript", self._clock_s())
            self._turn_over(words, order.speech_s, order.turn)

    def _turn_over(self, words: str, speech_s: float, turn: TurnClock) -> None:
        if words or self._partial:
            self._say_heard(words)
        self._partial = ""
        if words:
            self._history.add_user(words)
        heard = f"{self._unanswered} {words}".strip()
        self._unanswered = ""
        if heard and self._turns.in_turn:
            self._unanswered = heard  # the user has already gone on: one answer for all of it
        elif heard:
            self._asked_pardon = False
            self._enqueue(heard, answers=True, turn=turn)
        elif speech_s >= _PARDON_SPEECH_S and not self._asked_pardon:
            self._asked_pardon = True
            pardon = self._line(self._lines.pardon, self._persona.pardon)
            self._enqueue(pardon, answers=False, turn=turn)

    # ------------------------------------------------------------ utterances

    def _enqueue(self, text: str, *, answers: bool, turn: TurnClock | None) -> Job:
        self._last_id += 1
        job = Job(Utterance(self._last_id), text, answers, turn)
        self._waiting.append(job)
        self._jobs.put_nowait(job)
        return job

    def _drop_until(self, utterance_id: int, *, by_user: bool = False) -> None:
        now_s = self._clock_s()
        jobs = {
            job.utterance.utterance_id: job
            for job in (*self._sounding.values(), self._current, *self._waiting)
            if job is not None and job.utterance.utterance_id <= utterance_id
        }
        for job in jobs.values():
            if by_user and job.answers and job.utterance.started_s is None:
                # The user went on before an answer was heard: both parts are answered together.
                self._unanswered = f"{self._unanswered} {job.text}".strip()
            job.utterance.drop(now_s)
            self._sounding.pop(job.utterance.utterance_id, None)
            if job is self._current and self._current_task is not None:
                self._current_task.cancel()
                self._current = None
        self._waiting = [job for job in self._waiting if not job.utterance.dropped]
        if by_user:
            # Nothing lives, and the host knows of no id beyond the last one that it heard.
            self._last_id = self._last_audible_id

    async def _speak_all(self) -> None:
        while True:
            job = await self._jobs.get()
            if job.utterance.dropped:
                continue
            self._waiting.remove(job)
            self._current = job
            self._current_task = asyncio.create_task(self._perform(job), name="agent-utterance")
            try:
                await asyncio.wait([self._current_task])
            finally:
                self._current_task.cancel()
            if not self._current_task.cancelled() and (error := self._current_task.exception()):
                log.error("an utterance failed", exc_info=error)
                self._emit(AgentError(self.session_id, f"speech failed: {type(error).__name__}"))
            self._current = self._current_task = None

    async def _perform(self, job: Job) -> None:
        """Synthesizes and sends the utterance; each sentence leaves as soon as it is made."""
        loop = asyncio.get_running_loop()
        held: AgentAudio | None = None
        async with aclosing(self._sentences(job)) as sentences:
            async for sentence in sentences:
                if job.turn:
                    job.turn.stamp("reply", self._clock_s())
                if len(job.utterance.sentences) == 1:
                    await self._first_words(job)
                pcm = await loop.run_in_executor(
                    self._speak_thread, self._models.voice.synthesize, sentence
                )
                if not pcm:
                    continue
                if held is not None:
                    self._emit(held)
                held = self._send_sentence(job, sentence, pcm)
        if held is not None:
            self._emit(replace(held, last=True))

    async def _first_words(self, job: Job) -> None:
        """Until they are heard, and not so long that the sentence after them would come late."""
        wait_s = min(_FIRST_WORDS_S, job.utterance.sent_ms / 1000 / 2)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await job.heard.wait()

    def _send_sentence(self, job: Job, sentence: str, pcm: bytes) -> AgentAudio:
        """Returns the pause after it, kept back as it may become the utterance's last piece."""
        utterance = job.utterance
        first = not utterance.sentences
        start_ms = utterance.sent_ms
        bytes_per_ms = 2 * self._models.voice.sample_rate / 1000
        end_ms = start_ms + len(pcm) / bytes_per_ms
        utterance.sentences.append(SpokenSentence(sentence, start_ms, end_ms))
        utterance.sent_ms = end_ms + PAUSE_S * 1000
        if first:
            self._history.add_utterance(utterance)
            self._sounding[utterance.utterance_id] = job
            self._last_audible_id = utterance.utterance_id
        size = int(PIECE_S * self._models.voice.sample_rate) * 2
        for offset in range(0, len(pcm), size):
            text = sentence if offset == 0 else ""
            self._emit(self._audio(utterance, pcm[offset : offset + size], text))
        if first and job.turn:
            job.turn.stamp("first_audio", self._clock_s())
            self._emit(
                TurnTiming(self.session_id, utterance.utterance_id, dict(job.turn.stages_ms))
            )
        self._emit(
            Transcript(self.session_id, "character", utterance.text, False, utterance.utterance_id)
        )
        return self._audio(utterance, bytes(int(PAUSE_S * self._models.voice.sample_rate) * 2), "")

    def _audio(self, utterance: Utterance, pcm: bytes, text: str) -> AgentAudio:
        return AgentAudio(
            self.session_id,
            utterance.utterance_id,
            self._models.voice.sample_rate,
            pcm,
            text,
            last=False,
        )

    def _line(self, own: str | None, script: Callable[[], str]) -> str:
        """What is said beside the replies; empty, thus not said, where nobody has written it."""
        if own is not None:
            return own
        return script() if self._english else ""

    async def _sentences(self, job: Job) -> AsyncGenerator[str, None]:
        if not job.answers:
            for sentence in split_sentences(job.text):
                yield sentence
            return
        if self._chat is None:
            for sentence in split_sentences(self._persona.reply(job.text, self._calendar())):
                yield sentence
            return
        empty = True

        def first_token() -> None:
            if job.turn:
                job.turn.stamp("token", self._clock_s())

        lines = self._history.lines(HISTORY_LINES)
        try:
            async with aclosing(self._chat.reply(lines, first_token)) as sentences:
                first = asyncio.ensure_future(_next(sentences))
                try:
                    if self._filler_after_s:
                        await asyncio.wait([first], timeout=self._filler_after_s)
                    if self._filler_after_s and not first.done():
                        yield self._line(self._lines.filler, self._persona.filler)
                    found = await first
                finally:
                    first.cancel()
                while found is not None:
                    empty = False
                    yield found
                    found = await _next(sentences)
            if empty:
                raise ChatFailed("the chat endpoint sent an empty reply")
        except ChatFailed as error:
            log.warning("%s", error)
            self._emit(AgentError(self.session_id, str(error)))
            yield self._line(self._lines.apology, self._persona.apology)

    def _emit(self, event: AgentEvent) -> None:
        if self._open:
            self._emit_event(event)


async def _next(sentences: AsyncGenerator[str, None]) -> str | None:
    async for sentence in sentences:
        return sentence
    return None


def _joined(orders: list[Hear]) -> list[Hear]:
    """Neighbouring pieces of audio as one: when the recogniser is late, it catches up faster."""
    joined: list[Hear] = []
    for order in orders:
        if joined and order.kind == joined[-1].kind == "feed":
            joined[-1] = replace(joined[-1], pcm=joined[-1].pcm + order.pcm)
        else:
            joined.append(order)
    return joined
