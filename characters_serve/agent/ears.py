"""In: the agent's configuration. Out: the recogniser that will listen. Knows no audio, no turns.

Two can: whisper (faster-whisper) where it and a model are on this machine, and pocketsphinx, which
carries its model in its wheel and is always there.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from characters_serve.agent.pocketsphinx_ears import PocketsphinxEars
from characters_serve.agent.whisper_ears import WhisperEars, find_model
from characters_serve.config import AgentConfig, ConfigError

log = logging.getLogger(__name__)


class Ears(Protocol):
    """One turn after another: begin, feed while the user speaks, pause at a gap, finish.

    All PCM is 16 kHz int16. Called from one thread, which yields the cores by `niceness`.
    """

    description: str
    niceness: int
    pause_s: float
    """The silence at which `pause` is worth its time."""

    @property
    def settled(self) -> bool:
        """Whether `finish` would return what the last `pause` did."""
        ...

    def begin(self) -> None: ...

    def feed(self, pcm_16k: bytes) -> str:
        """Takes the next piece; returns the words so far, empty if not known yet."""
        ...

    def pause(self) -> str:
        """The user fell silent, perhaps for good: a chance to work ahead."""
        ...

    def finish(self) -> str: ...


def yield_cores(niceness: int) -> None:
    """Makes the calling thread nicer than its process."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, now + niceness)


def load_ears(config: AgentConfig) -> Ears:
    """Raises ConfigError when `whisper` is asked for by name and cannot be had; `auto` says what
    it took."""
    if config.recogniser == "pocketsphinx":
        return PocketsphinxEars()  # the configuration has made sure of the language
    installed = importlib.util.find_spec("faster_whisper") is not None
    model = find_model(config.whisper_model) if installed else None
    if model is not None:
        # Its own worker threads are as nice as the one that makes them.
        with ThreadPoolExecutor(
            1, initializer=yield_cores, initargs=(WhisperEars.niceness,)
        ) as nice_thread:
            return nice_thread.submit(WhisperEars, model, config.language).result()
    if not installed:
        missing = "faster-whisper is not installed"
    else:
        missing = "no model folder in agent.whisper_model"
    needed = config.recogniser == "whisper" or config.language != "en"
    if needed or config.whisper_model is not None:
        raise ConfigError(f"agent.recogniser: whisper cannot listen: {missing}")
    log.warning("pocketsphinx listens, which misunderstands more than whisper: %s", missing)
    return PocketsphinxEars()
