"""In: the scores of every configuration's clips. Out: a table, a JSON object, a picture, a verdict.

Knows nothing of how clips are made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from characters_serve.evaluation.clips import LOOK_EVERY_S, Score
from characters_serve.evaluation.run import LOOKED_AT, Plan, Scores, looks_file
from characters_serve.evaluation.statistics import (
    Interval,
    band_of,
    paired_difference,
    psnr,
    trend_per_minute,
)

_OFFSET_FRAMES: Final = 1
"""A median offset that moved by as much is a failure: the scores do not see it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one configuration. Differences are those to the baseline's first run."""

    name: str
    run: int
    lse_d: float
    lse_c: float
    offset: float
    difference_d: Interval | None
    difference_c: Interval | None
    trend_d: Interval | None

    @property
    def label(self) -> str:
        return f"{self.name}, again" if self.run else self.name


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[Row]
    band_d: float | None
    band_c: float | None
    window_times_s: list[float]
    windows_d: dict[str, list[float]]
    """Of each configuration's first run, the mean over clips in each window."""
    psnr_db: dict[str, list[float]]
    """By configuration, and `again` for reruns of the baseline: over time, LOOK_EVERY_S apart."""

    def failures(self) -> list[str]:
        """What the gate says against the configurations; empty where all may pass."""
        base = self.rows[0]
        words = []
        for row in self.rows:
            if row.difference_d is None or row.difference_c is None or row.run:
                continue
            if self.band_d is not None and row.difference_d.high > self.band_d:
                words.append(
                    f"{row.name}: LSE-D may be worse by {row.difference_d.high:.3f}, "
                    f"{self.band_d:.3f} is allowed"
                )
            if self.band_c is not None and row.difference_c.low < -self.band_c:
                words.append(
                    f"{row.name}: LSE-C may be worse by {-row.difference_c.low:.3f}, "
                    f"{self.band_c:.3f} is allowed"
                )
            if abs(row.offset - base.offset) >= _OFFSET_FRAMES:
                words.append(f"{row.name}: the offset moved from {base.offset:g} to {row.offset:g}")
        return words

    def table(self) -> str:
        width = max(len(row.label) for row in self.rows)
        trend = any(row.trend_d for row in self.rows)
        head = f"{'':{width}}   LSE-D   LSE-C  offset  {'LSE-D, difference':^25}  LSE-C, difference"
        lines = [head + ("          LSE-D a minute" if trend else "")]
        for row in self.rows:
            line = f"{row.label:{width}}  {row.lse_d:6.3f}  {row.lse_c:6.3f}  {row.offset:6g}"
            for interval in (row.difference_d, row.difference_c):
                line += f"  {_words(interval):25}"
            lines.append(line + (f"  {_words(row.trend_d)}" if trend else ""))
        if self.band_d is not None and self.band_c is not None:
            lines.append(f"band: LSE-D {self.band_d:.3f}, LSE-C {self.band_c:.3f}")
        return "\n".join(line.rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"failures": self.failures()}


def make_report(plan: Plan, scores: Scores, band: float | None = None) -> Report:
    """band: what is allowed of either score; without it what the reruns suggest, if there are."""
    first = scores[plan.baseline, 0]
    rows = [_row(name, run, scores[name, run], first, plan.window_s) for name, run in plan.runs]
    again = [row for row in rows if row.run]
    band_d = band_c = band
    if band is None and again:
        band_d = band_of([row.difference_d for row in again if row.difference_d])
        band_c = band_of([row.difference_c for row in again if row.difference_c])
    windows = len(first[0].windows)
    return Report(
        rows,
        band_d,
        band_c,
        [plan.window_s * (at + 0.5) for at in range(windows)],
        {
            name: [
                fmean(score.windows[at].distance for score in scores[name, 0])
                for at in range(windows)
            ]
            for name in plan.configurations
        },
        _psnr_over_time(plan),
    )


def _row(name: str, run: int, scores: list[Score], first: list[Score], window_s: float) -> Row:
    distances, confidences = _both(scores)
    is_baseline = scores is first
    base_d, base_c = _both(first)
    windows = [[window.distance for window in score.windows] for score in scores]
    times_s = [window_s * at for at in range(len(windows[0]))]
    return Row(
        name,
        run,
        fmean(distances),
        fmean(confidences),
        median(score.whole.offset for score in scores),
        None if is_baseline else paired_difference(base_d, distances),
        None if is_baseline else paired_difference(base_c, confidences),
        trend_per_minute(times_s, windows) if len(times_s) > 1 else None,
    )


def _both(scores: list[Score]) -> tuple[list[float], list[float]]:
    return [s.whole.distance for s in scores], [s.whole.confidence for s in scores]


def _psnr_over_time(plan: Plan) -> dict[str, list[float]]:
    """Between the baseline's first run and the others, the mean over the clips looked at. Pictures
    of another size than the baseline's are not compared."""
    found: dict[str, list[list[float]]] = {}
    for number in range(min(plan.clips, LOOKED_AT)):
        base = np.load(looks_file(plan, plan.baseline, 0, number))
        for name, run in plan.runs[1:]:
            other = np.load(looks_file(plan, name, run, number))
            if other.shape != base.shape:
                continue
            label = "again" if name == plan.baseline else name
            curve = [psnr(a, b) for a, b in zip(base, other, strict=True)]
            found.setdefault(label, []).append(curve)
    return {label: [float(x) for x in np.mean(curves, axis=0)] for label, curves in found.items()}


def _words(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def draw(report: Report, title: str, path: Path) -> None:
    """Differences beside the reruns' band, pixels over time, and long sessions window by window.

    Raises ImportError where matplotlib, of the extra `plot`, is not installed."""
    from matplotlib.figure import Figure

    long = len(report.window_times_s) > 1
    figure = Figure(figsize=(15 if long else 11, 4.5), layout="constrained")
    axes = figure.subplots(1, 3 if long else 2)
    _draw_differences(axes[0], report)
    times_s = LOOK_EVERY_S * np.arange(max(map(len, report.psnr_db.values()), default=0))
    for label, curve in report.psnr_db.items():
        again = label == "again"
        axes[1].plot(
            times_s,
            curve,
            label="the same configuration again" if again else label,
            color="#222" if again else None,
            linewidth=2.5 if again else 1.2,
        )
    axes[1].set_xlabel("seconds")
    axes[1].set_ylabel(f"PSNR to {report.rows[0].name}, dB")
    axes[1].set_title("Pixels, of runs that differ in noise and idle motion")
    if report.psnr_db:
        axes[1].legend(frameon=False)
    if long:
        for name, curve in report.windows_d.items():
            axes[2].plot(np.divide(report.window_times_s, 60), curve, label=name, linewidth=1.2)
        axes[2].set_xlabel("minutes")
        axes[2].set_ylabel("LSE-D")
        axes[2].set_title("Over the session")
        axes[2].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_differences(axes: Any, report: Report) -> None:
    shown = [row for row in report.rows if row.difference_d is not None]
    if report.band_d is not None:
        axes.axvspan(-report.band_d, report.band_d, color="#e8eef7", label="band")
    axes.axvline(0, color="#888", linewidth=1)
    for place, row in enumerate(reversed(shown)):
        interval = row.difference_d
        assert interval is not None
        colour = "#888888" if row.run else "#2a6fdb"
        axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2)
        axes.plot(interval.mean, place, "o", color=colour)
    axes.set_yticks(range(len(shown)), [row.label for row in reversed(shown)])
    axes.set_xlabel(f"LSE-D less that of {report.rows[0].name} (right is worse)")
    axes.set_title("Mean paired difference, 95 % interval")
