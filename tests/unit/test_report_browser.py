"""The report in a real browser: it is drawn in light and in dark, and the console stays silent."""

import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from report_material import make_run

from workers.report.page import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DEADLINE_S = 50
LIGHT, DARK = "1", "0"

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"
)


def take(page: Path, scheme: str, picture: Path) -> str:
    """Save ``page`` as it looks; returns what the browser's console says."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            *("--enable-logging=stderr", f"--user-data-dir={picture.with_suffix('.profile')}"),
            *("--window-size=1200,1600", f"--blink-settings=preferredColorScheme={scheme}"),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HOME": str(picture.parent)},
    )
    assert picture.exists(), done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def corner(picture: Path) -> tuple[int, ...]:
    """Red, green and blue of the pixel in the upper left, which no PNG filter changes."""
    data = picture.read_bytes()
    pixels, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += length + 12
    return tuple(zlib.decompress(pixels)[1:4])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_run(str(folder / "root"), "<script>console.log('it ran')</script>")
    return Path(write_report(str(folder / "root"), None, 8)[0])


@pytest.mark.parametrize(
    ("scheme", "paper"), [(LIGHT, (255, 255, 255)), (DARK, (0x12, 0x16, 0x1D))]
)
def test_the_page_is_drawn(
    page: Path, tmp_path: Path, scheme: str, paper: tuple[int, int, int]
) -> None:
    picture = tmp_path / "page.png"
    assert take(page, scheme, picture) == ""
    assert corner(picture) == paper
    assert picture.stat().st_size > 50_000  # not an empty page


def test_the_console_would_have_told(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<body>", "<body><script>1</script>"))
    assert "Content Security Policy" in take(broken, LIGHT, tmp_path / "broken.png")
