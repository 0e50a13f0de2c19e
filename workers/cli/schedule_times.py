"""When a schedule fires: what people write, as Temporal's specification and as stock options."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

from models.errors import ConfigurationError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+[smhd])+")
_CALENDAR = {
    "second": "0",
    "minute": "0",
    "hour": "0",
    "dayOfMonth": "*",
    "month": "*",
    "dayOfWeek": "*",
    "year": "*",
}
"""Fields of a calendar in the order of Temporal's cron with seven fields, and their defaults."""


class Overlap(StrEnum):
    """What happens to a firing while an earlier one runs."""

    SKIP = "skip"
    BUFFER_ONE = "buffer-one"
    BUFFER_ALL = "buffer-all"
    CANCEL_OTHER = "cancel-other"
    TERMINATE_OTHER = "terminate-other"
    ALLOW_ALL = "allow-all"

    @property
    def stock(self) -> str:
        """Its name in the stock ``temporal`` program."""
        return "".join(word.capitalize() for word in self.split("-"))


class Times(NamedTuple):
    """The times of a schedule in Temporal's terms."""

    intervals: list[tuple[timedelta, timedelta]]
    """Period and offset."""
    crons: list[str]
    """Of five to seven fields."""
    jitter: timedelta
    catch_up: timedelta


@dataclass(frozen=True, slots=True)
class Timing:
    """Times, policies and note of a schedule, as written on the command line."""

    cron: Sequence[str]
    every: Sequence[str]
    calendar: Sequence[str]
    time_zone: str | None
    jitter: str
    catch_up: str
    overlap: Overlap
    note: str
    paused: bool

    def times(self) -> Times:
        """What is written, understood.

        Raises:
            ConfigurationError: no time is given, or one is malformed.
        """
        if not (self.cron or self.every or self.calendar):
            raise ConfigurationError(
                "no time is given; write --cron '0 3 * * Mon', --every 6h or "
                """--calendar '{"dayOfWeek":"Mon","hour":"3"}'"""
            )
        return Times(
            intervals=[_interval(text) for text in self.every],
            crons=[*self.cron, *(_cron_of(text) for text in self.calendar)],
            jitter=duration("--jitter", self.jitter),
            catch_up=duration("--catch-up", self.catch_up),
        )

    def stock(self) -> list[str]:
        """The same as options of ``temporal schedule create``."""
        words = [word for text in self.cron for word in ("--cron", text)]
        words += [word for text in self.every for word in ("--interval", text)]
        words += [word for text in self.calendar for word in ("--calendar", text)]
        words += ["--overlap-policy", self.overlap.stock, "--catchup-window", self.catch_up]
        if duration("--jitter", self.jitter):
            words += ["--jitter", self.jitter]
        if self.time_zone:
            words += ["--time-zone", self.time_zone]
        if self.note:
            words += ["--notes", self.note]
        return [*words, *(["--paused"] if self.paused else [])]


def duration(option: str, text: str) -> timedelta:
    """``90s``, ``5m``, ``6h``, ``1d`` and their sums, such as ``1h30m``; ``0s`` is none.

    Raises:
        ConfigurationError: anything else; it names ``option``.
    """
    if not _DURATION.fullmatch(text):
        raise ConfigurationError(f"{option} {text!r} is no duration; write 90s, 5m, 6h or 1h30m")
    parts = re.findall(r"(\d+)([smhd])", text)
    return timedelta(seconds=sum(int(number) * _UNITS[unit] for number, unit in parts))


def _interval(text: str) -> tuple[timedelta, timedelta]:
    every, _, offset = text.partition("/")
    period = duration("--every", every)
    if not period:
        raise ConfigurationError(f"--every {text!r}: the interval must be above 0")
    return period, duration("--every", offset or "0s")


def _cron_of(text: str) -> str:
    """A calendar in the form of the stock program as a cron line of seven fields."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"--calendar {text!r} is not JSON: {error}") from None
    known = ", ".join(_CALENDAR)
    if not isinstance(given, dict) or not given:
        raise ConfigurationError(f"--calendar {text!r} must be an object of {known}")
    for name, value in given.items():
        if name not in _CALENDAR:
            raise ConfigurationError(f"--calendar {text!r}: no field {name!r}; known: {known}")
        if not isinstance(value, str) or not value or " " in value:
            raise ConfigurationError(f"--calendar {text!r}: {name} must be text without spaces")
    return " ".join(given.get(name, default) for name, default in _CALENDAR.items())
