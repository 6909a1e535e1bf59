"""`fedtmle silo page`: a page on loopback where a silo's owner reads what waits, and approves or rejects it.

The address that the command prints holds a token that opens the page once, in one browser, which then has a
cookie. A decision needs the cookie, a form of this page and this page as its origin, so that neither another
account of the machine nor another site in the owner's browser can decide. The page has no script.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from fedtmle.deploy.parties import ReceivedStudy, came_to, described
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime import ledger
from fedtmle.runtime.ledger import read
from fedtmle.studies.approval import Approval, review
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import file_plan, read_study, study_of
from fedtmle.text import approval as account_text
from fedtmle.text import approval as approval_text
from fedtmle.text.approval import render_preview
from fedtmle.text.home import render_home

# The owner's page as HTML, without a script; every word of a study is escaped: it comes from outside.

WAITS = "waits for you"
NONCE = "NONCE-OF-THE-STYLE"
STYLE = """\
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--panel:#f5f7f9;
--main:#0b5cad;--warn:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#12161b;--ink:#e8ecf1;--soft:#a8b3bf;--line:#38424d;
--panel:#1b2128;--main:#74b3f2;--warn:#ff8f85}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1rem}
h1{font-size:1.35rem;line-height:1.3}h2{font-size:1.1rem;margin-top:2rem}
a{color:var(--main)}.soft{color:var(--soft)}.waits{color:var(--warn);font-weight:600}
ul{list-style:none;padding:0}li{padding:.6rem 0;border-bottom:1px solid var(--line)}
code,dd{overflow-wrap:anywhere}
pre{background:var(--panel);border-radius:.5rem;padding:.8rem;overflow-x:auto;font-size:.85rem;line-height:1.4}
pre:focus-visible,a:focus-visible,button:focus-visible,input:focus-visible{outline:3px solid var(--main)}
form{margin:1rem 0;display:flex;flex-wrap:wrap;gap:.8rem;align-items:end}
label{display:block;font-size:.9rem}
input{font:inherit;padding:.4rem;border:1px solid var(--soft);border-radius:.4rem;width:min(24rem,90vw);
background:var(--paper);color:var(--ink)}
button{font:inherit;padding:.45rem 1.2rem;border-radius:.4rem;border:1.5px solid var(--main);
background:var(--paper);color:var(--main);cursor:pointer}
button.no{border-color:var(--warn);color:var(--warn)}
"""


@dataclass(frozen=True, kw_only=True)
class ListedStudy:
    """One study in the list."""

    plan: str
    words: str
    state: str


def overview_page(silo: str, rows: Sequence[ListedStudy], accounts: str, remembered: str) -> str:
    """Return the list of studies that came, the account of every study, and what the home remembers."""
    waiting = [row for row in rows if row.state == WAITS]
    decided = [row for row in rows if row.state != WAITS]
    body = [
        f"<h1>Studies at silo {escape(silo)}</h1>",
        '<section aria-labelledby="waiting"><h2 id="waiting">Waiting for you</h2>',
        _list(waiting, "No study waits."),
        '</section><section aria-labelledby="decided"><h2 id="decided">Decided</h2>',
        _list(decided, "None yet."),
        '</section><section aria-labelledby="ledger"><h2 id="ledger">What left this silo, by study</h2>',
        f'<pre tabindex="0" role="region" aria-labelledby="ledger">{escape(accounts)}</pre></section>',
        '<section aria-labelledby="home"><h2 id="home">What was asked about the same people</h2>',
        f'<pre tabindex="0" role="region" aria-labelledby="home">{escape(remembered)}</pre></section>',
    ]
    return _page(f"Silo {silo}", "".join(body))


def _list(rows: Sequence[ListedStudy], otherwise: str) -> str:
    if not rows:
        return f"<p>{otherwise}</p>"
    items = (
        f'<li><a href="/study/{escape(row.plan)}">{escape(row.words)}</a><br>'
        f'<span class="{"waits" if row.state == WAITS else "soft"}">{escape(row.state)}</span> '
        f'<span class="soft">plan {escape(row.plan[:16])}</span></li>'
        for row in rows
    )
    return f"<ul>{''.join(items)}</ul>"


def study_page(
    *,
    title: str,
    question: str,
    plan: str,
    silos: Sequence[str],
    state: str,
    goes_on: bool,
    preview: str,
    shown: str,
    text: str,
    key: str,
) -> str:
    """Return the page of one study: what it asks, what would leave, and the form to decide.

    ``shown`` is a digest of what the owner reads on it, which comes back with the decision.
    """
    absent = "<p>The study goes on without a silo that refuses or is absent when it opens.</p>" * goes_on
    body = [
        '<p><a href="/">All studies</a></p>',
        f"<h1>{escape(title or question)}</h1>",
        f"<p>{escape(question)}</p>" if title else "",
        f'<p class="soft">Plan <code>{escape(plan)}</code></p>',
        f"<p>Silos: {escape(', '.join(silos))}</p>{absent}",
        f'<p>State: <strong id="state">{escape(state)}</strong></p>',
        '<form method="post" action="/decide">',
        f'<input type="hidden" name="key" value="{escape(key)}">',
        f'<input type="hidden" name="plan" value="{escape(plan)}">',
        f'<input type="hidden" name="shown" value="{escape(shown)}">',
        "<label>A note for your own records<br>",
        '<input name="note" maxlength="500" autocomplete="off"></label>',
        '<button name="decision" value="approve">Approve this plan</button>',
        '<button class="no" name="decision" value="reject">Reject it</button></form>',
        '<h2 id="preview">What would leave</h2>',
        f'<pre tabindex="0" role="region" aria-labelledby="preview">{escape(preview)}</pre>',
        '<h2 id="text">The study as it came</h2>',
        f'<pre tabindex="0" role="region" aria-labelledby="text">{escape(text)}</pre>',
    ]
    return _page(title or question, "".join(body))


def message_page(words: str, *, back: bool = False) -> str:
    """Return a page with one message."""
    link = '<p><a href="/">All studies</a></p>' if back else ""
    return _page("fedtmle", f"<h1>{escape(words)}</h1>{link}")


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f'<style nonce="{NONCE}">{STYLE}</style></head><body><main>{body}</main></body></html>'
    )


COOKIE = "fedtmle_owner"
LONGEST_FORM = 16 << 10  # bytes
POLICY = (
    "default-src 'none'; style-src 'nonce-{}'; img-src data:; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
OpenPlans = Callable[[], Sequence[str] | None]


class OwnerServer(ThreadingHTTPServer):
    """Serve the page of one silo's owner on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, home: Home, *, port: int = 0, open_plans: OpenPlans = lambda: None) -> None:
        self._silo_file, self.open_plans = home.file.path, open_plans
        self.lock = threading.Lock()  # one decision or rehearsal at a time
        self.form_key = secrets.token_urlsafe(32)
        self._token, self._session = secrets.token_urlsafe(32), ""
        super().__init__(("127.0.0.1", port), _OwnerHandler)

    @property
    def home(self) -> Home:
        """The silo's home. The silo file is read anew, because the page may have been open for weeks."""
        return Home.of(self._silo_file)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """The address that opens the page once."""
        return f"{self.origin}/?token={self._token}"

    def enter(self, token: str) -> str:
        """Return a new session for the token, an empty string if it is wrong or was used."""
        with self.lock:
            if not self._token or not _same(token, self._token):
                return ""
            self._token, self._session = "", secrets.token_urlsafe(32)
            return self._session

    def knows(self, session: str) -> bool:
        """Return whether this is the browser that entered."""
        return bool(self._session) and _same(session, self._session)

    def study(self, plan: str) -> tuple[ReceivedStudy, Plan]:
        """Return a study that came, by its plan's digest; its text must still be that plan."""
        for found in came_to(self.home):
            if found.plan == plan:
                read_plan = file_plan(read_study(found.path, samples=False))
                if read_plan.digest.hex() != plan:
                    raise InputError("this study came under another version of fedtmle; nothing to decide")
                return found, read_plan
        raise InputError("no such study came to this silo")

    def rehearse(self, plan: Plan) -> tuple[str, str]:
        """Return the words of `fedtmle silo approve` and `preview` for a plan, and a digest.

        The digest is of the words, which depend on the policy and on earlier studies, and of the data.
        """
        with self.lock:
            home = self.home
            shown = self._review(plan, home)
            return _words_of(shown), _digest_of(shown, plan, home)

    def _review(self, plan: Plan, home: Home) -> Approval:
        found, _ = self.study(plan.digest.hex())
        return review(read_study(found.path, samples=False), home)

    def decide(self, plan: Plan, *, approved: bool, note: str, digest: str) -> None:
        """Sign and store the owner's decision; ``digest`` is that of the words that the owner approves."""
        with self.lock:
            home = self.home
            if not approved:
                home.reject(plan, note=note)
                return
            shown = self._review(plan, home)
            conflicts = shown.preview.conflicts
            if conflicts:
                raise InputError(f"your policy forbids this study: {' '.join(c.text for c in conflicts)}")
            if not _same(digest, _digest_of(shown, plan, home)):
                raise InputError(
                    "your silo file, your data or the earlier studies changed since this page was shown; "
                    "nothing was recorded; open the study again, read it and decide"
                )
            home.approve(plan, note=note, bits=shown.bits)

    def overview(self) -> str:
        """Return the list of studies and their accounts."""
        home, open_plans, rows = self.home, self.open_plans(), []
        for found in reversed(came_to(home)):
            closed = open_plans is not None and found.plan not in open_plans
            rows.append(ListedStudy(plan=found.plan, words=described(found), state=_state(found, closed)))
        path = home.ledger_path
        found_accounts = ledger.studies(read(path)) if path.exists() else []
        names = {row.plan: row.words for row in rows}
        accounts = account_text.render_accounts(found_accounts, names)
        return overview_page(home.file.name, rows, accounts, render_home(home.account()))


def _words_of(shown: Approval) -> str:
    return f"{approval_text.render_approval(shown)}\n\n{render_preview(shown.preview)}"


def _digest_of(shown: Approval, plan: Plan, home: Home) -> str:
    return hashlib.sha256(_words_of(shown).encode() + home.data_digest(plan)).hexdigest()


def _state(found: ReceivedStudy, closed: bool) -> str:
    if found.decision is not None:
        return f"{'approved' if found.decision.approved else 'rejected'} {found.decision.time[:16]}"
    return "closed by the coordinator" if closed else WAITS


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


class _OwnerHandler(BaseHTTPRequestHandler):
    server: OwnerServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token = parse_qs(address.query).get("token", [""])[0]
        if not self._is_for_us():
            return
        if token:
            session = self.server.enter(token)
            if session:
                cookie = f"{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/"
                self._redirect("/", cookie=cookie)
                return
        if not self._has_entered():
            return
        study = re.fullmatch(r"/study/([0-9a-f]{64})", address.path)
        if address.path == "/":
            self._page(self.server.overview)
        elif study:
            self._page(lambda: self._study(study[1]))
        else:
            self._send(HTTPStatus.NOT_FOUND, message_page("There is no such page.", back=True))

    def do_POST(self) -> None:
        if not self._is_for_us() or not self._has_entered():
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= LONGEST_FORM:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message_page("The form is too long.", back=True))
            return
        data = self.rfile.read(length).decode("utf-8", "replace")
        form = {name: values[0] for name, values in parse_qs(data, keep_blank_values=True).items()}
        is_ours = self.headers.get("Origin", "") == self.server.origin
        if not is_ours or not _same(form.get("key", ""), self.server.form_key):
            self._send(HTTPStatus.FORBIDDEN, message_page("This form is not of this page.", back=True))
        elif self.path != "/decide" or form.get("decision") not in ("approve", "reject"):
            self._send(HTTPStatus.BAD_REQUEST, message_page("There is nothing to decide here.", back=True))
        else:
            self._decide(form)

    def _decide(self, form: dict[str, str]) -> None:
        try:
            _, plan = self.server.study(form.get("plan", ""))
            approved = form["decision"] == "approve"
            note, digest = form.get("note", "")[:500], form.get("shown", "")
            self.server.decide(plan, approved=approved, note=note, digest=digest)
        except (FedTMLEError, OSError) as error:
            self._send(HTTPStatus.CONFLICT, message_page(_words(error), back=True))
            return
        self._redirect("/")

    def _study(self, digest: str) -> str:
        found, plan = self.server.study(digest)
        study = study_of(plan)
        preview, shown = self.server.rehearse(plan)
        return study_page(
            title=study.title,
            question=study.target.question,
            plan=digest,
            silos=list(plan.silos),
            state=_state(found, closed=False),
            goes_on=plan.program.goes_on,
            preview=preview,
            shown=shown,
            text=found.path.read_text(encoding="utf-8", errors="replace"),
            key=self.server.form_key,
        )

    def _is_for_us(self) -> bool:
        """Refuse requests under another host name, as DNS rebinding makes them."""
        if self.headers.get("Host", "") == urlsplit(self.server.origin).netloc:
            return True
        self._send(HTTPStatus.FORBIDDEN, message_page("This page is served to this machine only."))
        return False

    def _has_entered(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None and self.server.knows(cookie.value):
            return True
        words = "Start `fedtmle silo page` again and open the address that it prints: it works once."
        self._send(HTTPStatus.FORBIDDEN, message_page(words))
        return False

    def _page(self, make: Callable[[], str]) -> None:
        try:
            self._send(HTTPStatus.OK, make())
        except (FedTMLEError, OSError) as error:
            self._send(HTTPStatus.CONFLICT, message_page(_words(error), back=True))

    def _redirect(self, to: str, *, cookie: str = "") -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.send_header("Referrer-Policy", "no-referrer")
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()

    def _send(self, status: HTTPStatus, page: str) -> None:
        nonce = secrets.token_urlsafe(16)
        body = page.replace(NONCE, nonce, 1).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "same-origin")
        self.send_header("Content-Security-Policy", POLICY.format(nonce))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request: the terminal belongs to the owner."""


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, FedTMLEError) else "A file of this silo cannot be read or written."
