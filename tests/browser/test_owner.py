"""The owner's page in a browser: enter, read, approve, look at the ledger; another site cannot decide."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from fedtmle.deploy.demo import write_example
from fedtmle.deploy.owner import OwnerServer
from fedtmle.studies.home import Home
from tests.browser.conftest import Page
from tests.browser.test_watch import eventually
from tests.deploy.test_owner import receive
from tests.homes import home_at


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_at(write_example(tmp_path, 2).parent / "hospital-1" / "silo.toml")


@pytest.fixture
def server(home: Home) -> Iterator[OwnerServer]:
    served = OwnerServer(home)
    threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


def shows(page: Page, words: str) -> None:
    """A click returns before the next page is there."""
    assert eventually(lambda: words in page.text("main")), page.text("main")


def test_an_owner_reads_and_approves_a_study(page: Page, server: OwnerServer, home: Home) -> None:
    plan = receive(home, home.file.path.parent.parent / "study.toml")
    page.open(server.url, width=1000)
    assert "token" not in page.driver.current_url
    assert "waits for you" in page.text("main")
    page.driver.find_element(By.CSS_SELECTOR, "li a").click()
    shows(page, "What would leave")
    assert "Nothing has been sent." in " ".join(page.text("main").split())
    assert page.text("#state") == "waits for you"
    page.driver.find_element(By.NAME, "note").send_keys("seen by the board")
    page.driver.find_element(By.CSS_SELECTOR, "button[value=approve]").click()
    shows(page, "No study waits.")
    assert "approved" in page.text("main")
    decision = home.approvals.current()[plan]
    assert decision.approved
    assert decision.note == "seen by the board"
    page.driver.find_element(By.CSS_SELECTOR, "li a").click()
    shows(page, "What would leave")
    page.driver.find_element(By.CSS_SELECTOR, "button[value=reject]").click()
    shows(page, "rejected")
    assert not home.approvals.current()[plan].approved
    assert page.complaints() == []


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1000, True)])
def test_nothing_has_to_be_scrolled_sideways(
    page: Page, server: OwnerServer, home: Home, width: int, dark: bool
) -> None:
    plan = receive(home, home.file.path.parent.parent / "study.toml")
    page.open(server.url, width=width, dark=dark)
    assert not page.overflows()
    page.driver.get(f"{server.origin}/study/{plan}")
    assert "What would leave" in page.text("main")
    assert not page.overflows()
    assert page.complaints() == []


def test_a_form_on_another_site_decides_nothing(page: Page, server: OwnerServer, home: Home) -> None:
    """The owner is logged in, and opens a page of somebody who even knows the form's key."""
    plan = receive(home, home.file.path.parent.parent / "study.toml")
    page.open(server.url, width=1000)
    attack = (
        f'<form id="f" method="post" action="{server.origin}/decide">'
        f'<input name="key" value="{server.form_key}"><input name="plan" value="{plan}">'
        '<input name="decision" value="approve"></form>'
    )

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(attack.encode())

        def log_message(self, *_: object) -> None: ...

    evil = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=evil.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        page.driver.get(f"http://localhost:{evil.server_address[1]}/")
        page.ask("document.getElementById('f').submit()")
        assert eventually(lambda: page.driver.current_url.startswith(server.origin))
        assert "not" in page.text("h1") or "works once" in page.text("h1")
        assert home.approvals.current() == {}
    finally:
        evil.shutdown()
        evil.server_close()
    page.complaints()
