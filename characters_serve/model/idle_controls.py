"""Seeded idle motion of a character: head sway, blinks, gaze and brows; and how it listens.

While the user is heard it looks at them, raises its brows a little with their voice and nods now
and then; where they fall silent it nods once, as who has understood, unless it speaks by then.

The server draws these controls live, and the training data of the embedded character is made
with the same class, so that both see the same distribution.  Every number is drawn frame by
frame from one generator, so a stream does not depend on how it is cut into calls.
"""

from __future__ import annotations

import math
import random
from typing import Final

import numpy as np
from numpy.typing import NDArray

CONTROL_NAMES: Final = ("head_x", "head_y", "roll", "blink", "gaze_x", "gaze_y", "brow")
"""Columns of a control row: ``head_*``, ``roll``, ``gaze_*``, ``brow`` in [-1, 1], ``blink`` in
[0, 1].  Positive ``head_x`` / ``gaze_x`` is the picture's right, positive ``head_y`` / ``gaze_y``
is down, positive ``brow`` is raised and blink 1 is a closed eye."""

NUM_CONTROLS: Final = len(CONTROL_NAMES)

_BLINK_TIMES: Final = (0.0, 0.045, 0.085, 0.125, 0.17, 0.21, 0.27)
_BLINK_VALUES: Final = (0.0, 0.55, 1.0, 1.0, 0.6, 0.25, 0.0)
_BLINK_SECONDS: Final = _BLINK_TIMES[-1]
_NOD_SECONDS: Final = 0.75


def neutral() -> NDArray[np.float32]:
    """The control row of a still, frontal character with open eyes: float32 (7,) of zeros."""
    return np.zeros(NUM_CONTROLS, dtype=np.float32)


class _Sway:
    """A smooth motion in about [-1, 1]: slow sines around a pose that changes now and then."""

    def __init__(self, rng: random.Random, fps: int) -> None:
        self._rng = rng
        self._dt = 1.0 / fps
        bands = ((0.04, 0.12, 0.26), (0.12, 0.32, 0.20), (0.32, 0.70, 0.09))
        self._sines = [
            (amplitude, rng.uniform(low, high), rng.uniform(0.0, 2.0 * math.pi))
            for low, high, amplitude in bands
        ]
        self._pose = 0.0
        self._velocity = 0.0
        self._target = rng.gauss(0.0, 0.3)
        self._until_change = rng.uniform(1.0, 4.0)

    def step(self, time: float) -> float:
        """The value at ``time`` seconds; must be called once for every frame."""
        self._until_change -= self._dt
        if self._until_change <= 0.0:
            self._until_change = self._rng.uniform(1.5, 5.5)
            self._target = max(-0.7, min(0.7, self._rng.gauss(0.0, 0.34)))
        stiffness = 5.0  # 1/s of a critically damped spring
        pull = self._target - self._pose
        acceleration = stiffness**2 * pull - 2.0 * stiffness * self._velocity
        self._velocity += acceleration * self._dt
        self._pose += self._velocity * self._dt
        waves = sum(a * math.sin(2.0 * math.pi * f * time + p) for a, f, p in self._sines)
        return waves + self._pose


class IdleControls:
    """A stream of idle control rows, deterministic in ``seed`` and the per-frame inputs."""

    def __init__(self, seed: int, fps: int) -> None:
        if fps <= 0:
            raise ValueError(f"fps must be positive, got {fps}")
        self._rng = random.Random(seed)
        self._fps = fps
        self._frame = 0
        rng = self._rng
        self._sways = [_Sway(rng, fps) for _ in range(3)]
        self._liveliness = rng.uniform(0.55, 1.0)
        self._speaking = 0.0  # smoothed flag
        self._listening = 0.0  # smoothed energy
        self._beat_phase = rng.uniform(0.0, 2.0 * math.pi)
        self._blink_age = math.inf
        self._until_blink = rng.uniform(0.6, 3.5)
        self._gaze = (0.0, 0.0)
        self._gaze_from = (0.0, 0.0)
        self._gaze_to = (0.0, 0.0)
        self._gaze_progress = 1.0
        self._until_gaze = rng.uniform(0.8, 3.0)
        self._brow = 0.0
        self._brow_target = 0.0
        self._until_brow = rng.uniform(1.0, 4.0)
        self._nod_age = math.inf
        self._nod_size = 0.0
        self._until_nod = rng.uniform(0.8, 2.5)
        self._loudest = 0.0  # of the phrase that is being listened to

    def next(
        self, num_frames: int, *, speaking: bool, listening_energy: float = 0.0
    ) -> NDArray[np.float32]:
        """The next ``num_frames`` control rows, float32 (num_frames, 7).

        ``speaking``: whether the character talks in these frames.  ``listening_energy``: how
        loudly the user talks, 0 (silence) to 1.
        """
        rows = np.empty((num_frames, NUM_CONTROLS), dtype=np.float32)
        energy = min(max(listening_energy, 0.0), 1.0)
        for index in range(num_frames):
            rows[index] = self._step(speaking, energy)
        return rows

    def _step(self, speaking: bool, energy: float) -> tuple[float, ...]:
        dt = 1.0 / self._fps
        time = self._frame * dt
        self._frame += 1
        self._speaking += (float(speaking) - self._speaking) * min(1.0, 5.0 * dt)
        self._listening += (energy - self._listening) * min(1.0, 4.0 * dt)

        head_x, head_y, roll = (sway.step(time) for sway in self._sways)
        amount = self._liveliness * (0.75 + 0.35 * self._speaking)
        beat = self._head_beat(dt)
        head_x, roll = amount * head_x, amount * roll
        head_y = amount * 0.9 * head_y + 0.16 * beat + self._nod(dt, speaking)
        roll += 0.05 * beat
        gaze_x, gaze_y = self._next_gaze(dt, speaking)
        return (
            _limit(head_x),
            _limit(head_y),
            _limit(roll),
            self._next_blink(dt, speaking),
            _limit(gaze_x),
            _limit(gaze_y),
            _limit(self._next_brow(dt, speaking) + 0.10 * beat),
        )

    def _head_beat(self, dt: float) -> float:
        """Small quick head movement that accompanies speech, in [-1, 1]."""
        self._beat_phase += 2.0 * math.pi * dt * self._rng.uniform(0.6, 2.6)
        return self._speaking * math.sin(self._beat_phase)

    def _nod(self, dt: float, speaking: bool) -> float:
        """Downward offset of a nod; nods start while the user is heard, and as they fall silent."""
        self._nod_age += dt
        self._loudest = max(self._loudest, self._listening)
        if self._loudest > 0.15 and self._listening < 0.35 * self._loudest:
            self._loudest = 0.0
            self._until_nod = 0.0 if self._rng.random() < 0.7 else self._until_nod
        if (self._listening > 0.05 or self._until_nod <= 0.0) and not speaking:
            self._until_nod -= dt
            if self._until_nod <= 0.0:
                self._until_nod = self._rng.uniform(1.8, 5.0)
                self._nod_age = 0.0
                self._nod_size = self._rng.uniform(0.25, 0.6)
        if self._nod_age >= _NOD_SECONDS:
            return 0.0
        part = self._nod_age / _NOD_SECONDS
        return self._nod_size * math.sin(math.pi * part) ** 2 * math.cos(1.5 * math.pi * part)

    def _next_blink(self, dt: float, speaking: bool) -> float:
        self._blink_age += dt
        self._until_blink -= dt
        if self._until_blink <= 0.0:
            self._blink_age = 0.0
            if self._rng.random() < 0.14:
                self._until_blink = self._rng.uniform(0.32, 0.45)  # a double blink
            else:
                self._until_blink = self._rng.uniform(1.8, 4.4 if speaking else 5.2)
        if self._blink_age >= _BLINK_SECONDS:
            return 0.0
        return float(np.interp(self._blink_age, _BLINK_TIMES, _BLINK_VALUES))

    def _next_gaze(self, dt: float, speaking: bool) -> tuple[float, float]:
        self._until_gaze -= dt
        rng = self._rng
        if self._until_gaze <= 0.0:
            self._gaze_from = self._gaze
            self._gaze_progress = 0.0
            at_viewer = max(abs(self._gaze_to[0]), abs(self._gaze_to[1])) < 0.12
            away = 0.62 if speaking else 0.5 if self._listening < 0.05 else 0.15
            if at_viewer and rng.random() < away:
                self._gaze_to = (rng.gauss(0.0, 0.48), rng.gauss(-0.05, 0.3))
                self._until_gaze = rng.uniform(0.35, 1.3)
            else:
                self._gaze_to = (rng.uniform(-0.05, 0.05), rng.uniform(-0.04, 0.04))
                self._until_gaze = rng.uniform(0.9, 3.4)
            distance = math.dist(self._gaze_from, self._gaze_to)
            if distance > 0.6 and rng.random() < 0.3:
                self._until_blink = min(self._until_blink, 0.05)  # large saccades draw a blink
        self._gaze_progress = min(1.0, self._gaze_progress + dt / 0.105)
        part = self._gaze_progress * self._gaze_progress * (3.0 - 2.0 * self._gaze_progress)
        (from_x, from_y), (to_x, to_y) = self._gaze_from, self._gaze_to
        self._gaze = (from_x + (to_x - from_x) * part, from_y + (to_y - from_y) * part)
        return self._gaze

    def _next_brow(self, dt: float, speaking: bool) -> float:
        self._until_brow -= dt
        if self._until_brow <= 0.0:
            rng = self._rng
            if abs(self._brow_target) < 0.15:
                raised = rng.random() < 0.78
                self._brow_target = rng.uniform(0.35, 0.95) if raised else rng.uniform(-0.6, -0.2)
                self._until_brow = rng.uniform(0.35, 1.3)
            else:
                self._brow_target = rng.uniform(-0.1, 0.1)
                self._until_brow = rng.uniform(0.7, 2.4) if speaking else rng.uniform(2.0, 6.0)
        self._brow += (self._brow_target - self._brow) * min(1.0, 9.0 * dt)
        return self._brow + (0.0 if speaking else 0.25 * self._listening)


def _limit(value: float) -> float:
    return max(-1.0, min(1.0, value))
