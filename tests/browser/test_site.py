"""The site of the documentation in a real browser: its search finds pages, and no page is too wide."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser.conftest import Page

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = 10  # results on the first screen
FOUND = {
    "survival": "survival.html",
    "missing": "studies/03_missing.html",
    "refused": "threats.html",
    "certificate": "certificate.html",
}
PAGES = ("index", "first/owner", "studies/index", "comparison", "threats", "proved", "api", "glossary")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve files and write no line for a request."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built without running the worked studies."""
    pytest.importorskip("sphinx", reason="`make docs` installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-D", "plot_gallery=0", str(DOCS), str(folder)]
    subprocess.run(command, check=True)  # noqa: S603 - our own command
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("word", FOUND)
def test_the_search_box_finds_a_word(page: Page, site: str, word: str, width: int) -> None:
    """Typing a word and Enter brings the page about it among the first results."""
    page.open(f"{site}/index.html", width=width)
    _displayed(page, ".search-button, .search-button__button").click()
    _displayed(page, "input[name=q]").send_keys(word, Keys.ENTER)
    WebDriverWait(page.driver, 20).until(lambda driver: "Search finished" in driver.page_source)
    links = page.driver.find_elements(By.CSS_SELECTOR, "#search-results li > a")[:SHOWN]
    found = [str(link.get_attribute("href")) for link in links]
    assert any(f"/{FOUND[word]}" in address for address in found), found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_scrolls_sideways(page: Page, site: str, width: int, dark: bool) -> None:
    """Wide tables and code scroll inside the page; dark mode follows the reader's system."""
    for name in PAGES:
        page.open(f"{site}/{name}.html", width=width, dark=dark)
        assert not page.overflows(), name
        theme = page.ask("return document.documentElement.dataset.theme")
        assert theme == ("dark" if dark else "light"), name


def _displayed(page: Page, selector: str) -> WebElement:
    """Return the first element of a selector that is displayed, once there is one."""
    elements = partial(page.driver.find_elements, By.CSS_SELECTOR, selector)
    WebDriverWait(page.driver, 20).until(lambda _: any(each.is_displayed() for each in elements()))
    return next(each for each in elements() if each.is_displayed())
