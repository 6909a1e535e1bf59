"""The owner's page over HTTP: who may enter, who may decide, and what a study cannot do to the page."""

from __future__ import annotations

import http.client
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from fedtmle.deploy.demo import write_example
from fedtmle.deploy.owner import COOKIE, OwnerServer
from fedtmle.engine.post import studies_folder
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import file_plan, read_study
from tests.homes import home_at

EVIL = '<script>alert(1)</script>\\" onload=x'


def receive(home: Home, study: Path) -> str:
    """Let a study come to a silo; return its plan."""
    plan = file_plan(read_study(study)).digest.hex()
    shutil.copy(study, studies_folder(home.folder) / f"{plan}.toml")
    return plan


@dataclass
class Browser:
    """The little that a browser does: one origin, cookies, and the headers that it adds by itself."""

    server: OwnerServer
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> tuple[int, str]:
        given = {"Origin": self.server.origin, "Content-Type": "application/x-www-form-urlencoded"}
        return self._ask("POST", path, urlencode(form), given | headers)

    def _ask(self, verb: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, str]:
        line = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=60)
        cookie = {"Cookie": self.cookie} if self.cookie else {}
        line.request(verb, path, body=body, headers=cookie | headers)
        answer = line.getresponse()
        text = answer.read().decode()
        self.headers = dict(answer.getheaders())
        if "Set-Cookie" in self.headers:
            self.cookie = self.headers["Set-Cookie"].split(";")[0]
        line.close()
        return answer.status, text

    def enter(self) -> None:
        status, _ = self.get(urlsplit(self.server.url)._replace(scheme="", netloc="").geturl())
        assert status == 303

    def form(self, plan: str, decision: str, **other: str) -> dict[str, str]:
        _, page = self.get(f"/study/{plan}")
        (key,) = re.findall('name="key" value="([^"]+)"', page)
        (shown,) = re.findall('name="shown" value="([^"]+)"', page)
        return {"key": key, "plan": plan, "shown": shown, "decision": decision, "note": ""} | other


@pytest.fixture
def place(tmp_path: Path) -> tuple[Home, str]:
    study = write_example(tmp_path, 2)
    text = study.read_text().replace("[target]", f'title = "{EVIL}"\n\n[target]', 1)
    study.write_text(text)
    home = home_at(tmp_path / "hospital-1" / "silo.toml")
    return home, receive(home, study)


@pytest.fixture
def browser(place: tuple[Home, str]) -> Iterator[Browser]:
    server = OwnerServer(place[0], open_plans=lambda: [place[1]])
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield Browser(server)
    server.shutdown()
    server.server_close()


def test_the_token_opens_the_page_once_and_nothing_else_does(browser: Browser) -> None:
    token = urlsplit(browser.server.url).query
    assert browser.get("/")[0] == 403
    assert browser.get("/?token=wrong")[0] == 403
    browser.enter()
    assert "HttpOnly; SameSite=Strict" in browser.headers["Set-Cookie"]
    status, page = browser.get("/")
    assert status == 200
    assert "What was asked about the same people" in page
    assert "No study was answered yet." in page
    other = Browser(browser.server)
    assert other.get(f"/?{token}")[0] == 403
    other.cookie = f"{COOKIE}=guess"
    assert other.get("/")[0] == 403
    assert other.post("/decide", {})[0] == 403


def test_a_study_is_approved_for_the_rows_that_are_there(browser: Browser, place: tuple[Home, str]) -> None:
    home, plan = place
    browser.enter()
    _, listed = browser.get("/")
    assert "waits for you" in listed
    form = browser.form(plan, "approve", note="board of 3 May")
    assert browser.post("/decide", form)[0] == 303
    decision = home.approvals.current()[plan]
    assert decision.approved
    assert decision.note == "board of 3 May"
    found = file_plan(read_study(studies_folder(home.folder) / f"{plan}.toml", samples=False))
    assert decision.data == home.data_digest(found).hex()
    assert "approved 20" in browser.get("/")[1]
    assert browser.post("/decide", browser.form(plan, "reject"))[0] == 303
    assert not home.approvals.current()[plan].approved


@pytest.mark.parametrize("changed", ["policy", "data"])
def test_what_changed_since_the_page_was_shown_is_not_approved(
    browser: Browser, place: tuple[Home, str], changed: str
) -> None:
    """The page signs nothing that it did not show: not the policy or the records of another day."""
    home, plan = place
    browser.enter()
    stale = browser.form(plan, "approve")
    lowered = '\n[policy]\nmin_arm_rows = 5\n\n[policy.reasons]\nmin_arm_rows = "rare disease"\n'
    before = browser.get(f"/study/{plan}")[1]
    if changed == "policy":
        home.file.path.write_text(home.file.path.read_text() + lowered)
    else:
        records = home.file.path.parent / "infants.csv"
        records.write_text("\n".join(records.read_text().splitlines()[:-1]) + "\n")
    status, page = browser.post("/decide", stale)
    assert status == 409
    assert "changed since this page was shown" in page
    assert home.approvals.current() == {}
    now = browser.get(f"/study/{plan}")[1]
    assert now != before
    assert ("LOWERED" in now) == (changed == "policy")
    assert browser.post("/decide", browser.form(plan, "approve"))[0] == 303
    decision = home.approvals.current()[plan]
    assert [limit.key for limit in decision.lowered] == ["min_arm_rows"] * (changed == "policy")
    found = file_plan(read_study(studies_folder(home.folder) / f"{plan}.toml", samples=False))
    assert decision.data == home_at(home.file.path).data_digest(found).hex()


def test_the_page_has_the_words_of_the_preview(browser: Browser, place: tuple[Home, str]) -> None:
    browser.enter()
    _, page = browser.get(f"/study/{place[1]}")
    assert "What silo &#x27;hospital 1&#x27; would send" in page
    assert "Your limits:" in page
    assert "Nothing has been sent." in " ".join(page.split())


def test_another_site_or_a_form_without_our_key_decides_nothing(
    browser: Browser, place: tuple[Home, str]
) -> None:
    home, plan = place
    browser.enter()
    form = browser.form(plan, "approve")
    wrong = [
        ({"Origin": "http://evil.example"}, form),
        ({"Origin": "null"}, form),
        ({"Origin": ""}, form),
        ({}, {**form, "key": "guess"}),
        ({}, {name: value for name, value in form.items() if name != "key"}),
    ]
    for headers, given in wrong:
        assert browser.post("/decide", given, **headers)[0] == 403
    assert browser.get(f"/decide?{urlencode(form)}")[0] == 404
    assert browser.post("/decide", {**form, "decision": "maybe"})[0] == 400
    assert browser.post("/other", form)[0] == 400
    assert browser.post("/decide", {**form, "note": "x" * 20000})[0] == 413
    assert browser.post("/decide", {**form, "plan": "0" * 64})[0] == 409
    assert home.approvals.current() == {}
    assert browser.post("/decide", form)[0] == 303  # the same form, as it should be
    assert home.approvals.current()[plan].approved


def test_another_host_name_is_refused(browser: Browser) -> None:
    token = urlsplit(browser.server.url).query
    for host in ("evil.example", "localhost", "", f"evil.example:{browser.server.server_address[1]}"):
        assert browser.get(f"/?{token}", Host=host)[0] == 403
    browser.enter()  # the token was not used up


def test_the_words_of_a_study_are_text(browser: Browser, place: tuple[Home, str]) -> None:
    browser.enter()
    for path in ("/", f"/study/{place[1]}"):
        status, page = browser.get(path)
        assert status == 200
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        policy = browser.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "script-src" not in policy
        assert "form-action 'self'; frame-ancestors 'none'" in policy


def test_a_text_that_is_not_the_plan_of_its_name_cannot_be_decided(
    browser: Browser, place: tuple[Home, str]
) -> None:
    home, plan = place
    browser.enter()
    form = browser.form(plan, "approve")
    path = studies_folder(home.folder) / f"{plan}.toml"
    path.write_text(f"[options]\nseed = 9\n\n{path.read_text()}")
    assert browser.get(f"/study/{plan}")[0] == 409
    assert browser.post("/decide", form)[0] == 409
    path.write_text("not TOML = = [")
    assert "another version" in browser.get("/")[1]
    assert browser.get(f"/study/{plan}")[0] == 409
    assert home.approvals.current() == {}


def test_a_plan_that_a_restoration_closed_cannot_be_approved(
    browser: Browser, place: tuple[Home, str]
) -> None:
    home, plan = place
    (home.folder / "closed").write_text(f"{plan}\n")
    browser.enter()
    status, page = browser.post("/decide", browser.form(plan, "approve"))
    assert status == 409
    assert "with another seed" in page
