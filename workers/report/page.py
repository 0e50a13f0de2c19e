"""The page: every value passes one door, which redacts it and makes it harmless to read."""

import re
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from activities.analysis.audit import Audit
from activities.analysis.lives import Fate
from activities.storage import layout
from activities.storage.store import Store
from models.errors import ConfigurationError
from workers.cli.audit_report import as_json
from workers.report import charts, content, timeline
from workers.report.redaction import Redactor
from workers.report.responses import MOST_TOKENS

TEMPLATE = "page.html.j2"
MOST_ROWS = 200
"""Of any one table."""
MOST_CHARS = 1_500
"""Of any one value: an error's text, a response's hidden form."""
_SAID_ELSEWHERE = ("run_id", "notes", "verdict", "updates", "cursor", "prompts_dropped")
"""Of an audit."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
"""Control characters, marks that turn the direction of writing, halves of pairs."""


def render(root: str, most_responses: int) -> str:
    """The report of the run under ``root`` as one HTML document.

    Raises:
        ConfigurationError: ``root`` holds no run.
    """
    read, redactor = content.read_content(root, most_responses)
    page = _environment(redactor).get_template(TEMPLATE)
    return page.render(
        run=read,
        reward=content.first_and_last(read),
        policy_version=content.policy_version(read),
        running_seconds=content.running_seconds(read),
        held_out=read.curves.held_out(),
        fates=_fates(read.books),
        audit_pairs=_counts(read.books),
        serving_pairs=[(name, number_text(count)) for name, count in read.serving.items()],
        token_limit=MOST_TOKENS,
        row_limit=MOST_ROWS,
        chart_size=charts,
        lane_size=timeline,
    )


def write_report(root: str, path: str | None, most_responses: int) -> tuple[str, int]:
    """Write the report of ``root`` to ``path``, or beside the run's other files.

    Returns:
        Where it is, and its size in bytes.

    Raises:
        ConfigurationError: ``root`` holds no run, or ``path`` cannot be written.
    """
    data = render(root, most_responses).encode()
    target = Path(path) if path is not None else None
    if target is not None and target.is_dir():
        raise ConfigurationError(f"--output {path}: is a folder; name a file, such as report.html")
    store = Store(root if target is None else target.resolve().parent)
    name = layout.REPORT if target is None else target.name
    store.write_bytes(name, data)
    return f"{store.root}/{name}", len(data)


def _counts(books: Audit) -> content.Facts:
    """What the audit counted, in words; every reason of a drop by itself."""
    counts = {key: value for key, value in as_json(books).items() if key not in _SAID_ELSEWHERE}
    dropped = [(f"dropped: {reason}", str(n)) for reason, n in books.prompts_dropped.items()]
    return [(key.replace("_", " "), value) for key, value in content.flat(counts)] + dropped


def _fates(books: Audit) -> list[tuple[str, int]]:
    """Every fate with its prompts, the usual one first."""
    return [(fate.value, books.count(fate)) for fate in Fate]


def _environment(redactor: Redactor) -> Environment:
    def harmless(value: Any) -> Any:
        if isinstance(value, Markup) or not isinstance(value, str):
            return value  # a macro's own output: what is in it came through here
        return visible(redactor.text(value))

    def short(value: Any, length: int = MOST_CHARS) -> str:
        text = redactor.text(str(value))  # first: half a credential is not recognized
        return text if len(text) <= length else f"{text[: length - 1]}…"

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number_text,
        "seconds": seconds_text,
        "time": time_text,
        "size": size_text,
        "percent": percent_text,
        "short": short,
    }
    return environment


def visible(text: str) -> str:
    """``text`` with every character that cannot be seen, or changes its neighbors, spelled out."""
    return _UNSEEN.sub(_spelled, text)


def number_text(value: float | None) -> str:
    """Four digits that count; a dash for none."""
    if value is None:
        return "—"
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}"


def seconds_text(value: float | None) -> str:
    """Seconds as people say them."""
    if value is None:
        return "—"
    if value < 120:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def time_text(unix: float | None) -> str:
    """Date and time in UTC."""
    if unix is None:
        return "—"
    try:
        return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "—"


def size_text(num_bytes: float | None) -> str:
    """Bytes with a prefix of 1,024."""
    if num_bytes is None:
        return "—"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def percent_text(share: float) -> str:
    """A share of one as percent."""
    return f"{100 * share:.1f} %"


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    name = unicodedata.name(found[0], "")
    return f"⟨{name or f'U+{code:04X}'}⟩"
