"""Take a picture of a run's page in the Temporal Web UI.

    pip install playwright; apt-get install chromium
    python scripts/screenshot_webui.py http://127.0.0.1:8233 train/quickstart docs/webui.png

The page keeps a connection open, so waiting for network silence would never end; the script waits
for the workflow's own heading instead.
"""

import argparse
import sys
from urllib.parse import quote

from playwright.sync_api import sync_playwright

DEADLINE_MS = 60_000
SETTLE_MS = 4_000
"""The time line is drawn after its data arrived; nothing announces the end of drawing."""


def take(url: str, workflow_id: str, page_name: str, output: str, chromium: str) -> list[str]:
    """Open the workflow's ``page_name`` page, save it, return the console's error lines."""
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1100})
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        base = f"{url}/namespaces/default/workflows/{quote(workflow_id, safe='')}"
        page.goto(base, wait_until="domcontentloaded", timeout=DEADLINE_MS)
        page.get_by_text(workflow_id).first.wait_for(timeout=DEADLINE_MS)
        if page_name:
            page.goto(f"{page.url.rsplit('/', 1)[0]}/{page_name}", wait_until="domcontentloaded")
            page.get_by_text(workflow_id).first.wait_for(timeout=DEADLINE_MS)
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=output)
        browser.close()
    return errors


def main() -> None:
    """Parse the command line and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("workflow_id")
    parser.add_argument("output")
    parser.add_argument("--page", default="", help="for example timeline or user-metadata")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    for line in take(
        options.url, options.workflow_id, options.page, options.output, options.chromium
    ):
        print("console error:", line, file=sys.stderr)


if __name__ == "__main__":
    main()
