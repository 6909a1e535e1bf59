"""The owner's page as HTML, without a script; every word of a study is escaped: it comes from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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


def overview(silo: str, rows: Sequence[ListedStudy], accounts: str) -> str:
    """Return the list of studies that came, and the account of every study."""
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


def study(
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


def message(words: str, *, back: bool = False) -> str:
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
