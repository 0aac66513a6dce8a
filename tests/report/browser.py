"""A page in headless Chromium: what it says when its program has run, and whether anything went wrong on the way."""

from __future__ import annotations

import html.parser
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")


@dataclass
class Page(html.parser.HTMLParser):
    """Attributes of all elements, with the tag as 'tag', and the text outside of style and script."""

    elements: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.elements.append({"tag": tag, **{name: value or "" for name, value in attrs}})

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("style", "script"):
            self.text += data

    def having(self, attribute: str) -> list[dict[str, str]]:
        return [element for element in self.elements if attribute in element]


def shown(url: str, window: str = "1300,1600") -> Page:
    """The page after its program has run and ten seconds have passed for it, which take no time. Fails with what stands
    on the console, if anything does."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
        options += ["--enable-logging=stderr", "--virtual-time-budget=10000", f"--window-size={window}"]
        done = subprocess.run([CHROMIUM, *options, "--dump-dom", url], capture_output=True, timeout=120)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    assert not console
    assert done.returncode == 0, done.stderr[-2000:]
    page = Page()
    page.feed(done.stdout.decode())
    return page
