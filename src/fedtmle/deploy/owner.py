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
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from fedtmle.deploy import owner_page as pages
from fedtmle.deploy.studies import ReceivedStudy, came_to, described
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime import accounts
from fedtmle.runtime.ledger import read
from fedtmle.studies.approval import Approval, review
from fedtmle.studies.home import Home, data_digest
from fedtmle.studyfile.file import file_plan, read_study, study_of
from fedtmle.text import accounts as account_text
from fedtmle.text import approval as approval_text
from fedtmle.text.preview import render

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
            if shown.conflicts:
                raise InputError(f"earlier studies forbid this one: {' '.join(shown.conflicts)}")
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
            rows.append(
                pages.ListedStudy(plan=found.plan, words=described(found), state=_state(found, closed))
            )
        path = home.ledger_path
        found_accounts = accounts.studies(read(path)) if path.exists() else []
        names = {row.plan: row.words for row in rows}
        return pages.overview(home.file.name, rows, account_text.render(found_accounts, names))


def _words_of(shown: Approval) -> str:
    return f"{approval_text.render(shown)}\n\n{render(shown.preview)}"


def _digest_of(shown: Approval, plan: Plan, home: Home) -> str:
    return hashlib.sha256(_words_of(shown).encode() + data_digest(plan, home.file)).hexdigest()


def _state(found: ReceivedStudy, closed: bool) -> str:
    if found.decision is not None:
        return f"{'approved' if found.decision.approved else 'rejected'} {found.decision.time[:16]}"
    return "closed by the coordinator" if closed else pages.WAITS


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
            self._send(HTTPStatus.NOT_FOUND, pages.message("There is no such page.", back=True))

    def do_POST(self) -> None:
        if not self._is_for_us() or not self._has_entered():
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= LONGEST_FORM:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, pages.message("The form is too long.", back=True))
            return
        data = self.rfile.read(length).decode("utf-8", "replace")
        form = {name: values[0] for name, values in parse_qs(data, keep_blank_values=True).items()}
        is_ours = self.headers.get("Origin", "") == self.server.origin
        if not is_ours or not _same(form.get("key", ""), self.server.form_key):
            self._send(HTTPStatus.FORBIDDEN, pages.message("This form is not of this page.", back=True))
        elif self.path != "/decide" or form.get("decision") not in ("approve", "reject"):
            self._send(HTTPStatus.BAD_REQUEST, pages.message("There is nothing to decide here.", back=True))
        else:
            self._decide(form)

    def _decide(self, form: dict[str, str]) -> None:
        try:
            _, plan = self.server.study(form.get("plan", ""))
            approved = form["decision"] == "approve"
            note, digest = form.get("note", "")[:500], form.get("shown", "")
            self.server.decide(plan, approved=approved, note=note, digest=digest)
        except (FedTMLEError, OSError) as error:
            self._send(HTTPStatus.CONFLICT, pages.message(_words(error), back=True))
            return
        self._redirect("/")

    def _study(self, digest: str) -> str:
        found, plan = self.server.study(digest)
        study = study_of(plan)
        preview, shown = self.server.rehearse(plan)
        return pages.study(
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
        self._send(HTTPStatus.FORBIDDEN, pages.message("This page is served to this machine only."))
        return False

    def _has_entered(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None and self.server.knows(cookie.value):
            return True
        words = "Start `fedtmle silo page` again and open the address that it prints: it works once."
        self._send(HTTPStatus.FORBIDDEN, pages.message(words))
        return False

    def _page(self, make: Callable[[], str]) -> None:
        try:
            self._send(HTTPStatus.OK, make())
        except (FedTMLEError, OSError) as error:
            self._send(HTTPStatus.CONFLICT, pages.message(_words(error), back=True))

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
        body = page.replace(pages.NONCE, nonce, 1).encode()
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
