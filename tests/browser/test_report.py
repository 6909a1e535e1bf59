"""The report as a browser shows it: at three widths, light and dark, and on paper."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.report.page import render
from fedtmle.studies.run import run
from tests.browser.conftest import Page

WIDTHS = (360, 768, 1440)
FIGURES = (
    "participants-flow",
    "balance-0",
    "overlap-sizes",
    "probability-0",
    "ladder-0",
    "forest-0",
    "spread-0",
    "trajectory",
    "bits",
)
SEEN = """
const box = e => e.getBoundingClientRect();
return [...document.querySelectorAll('figure svg')].filter(s => box(s).width > 0).map(s => {
  const labels = [...s.querySelectorAll('text')];
  return {
    key: s.parentElement.id,
    title: s.querySelector('title').textContent,
    said: s.querySelector('desc').textContent,
    role: s.getAttribute('role'),
    marks: s.querySelectorAll('circle,path,rect').length,
    font: Math.min(...labels.map(t => box(t).height)),
    out: labels.filter(t => box(t).left < box(s).left - 2 || box(t).right > box(s).right + 2).length,
  };
});"""
CONTRAST = """
const light = colour => {
  const v = colour.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * v[0] + .7152 * v[1] + .0722 * v[2];
};
const paper = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('p,li,th,td,a,h1,h2,figcaption,span,caption,svg text')]
  .filter(e => e.getBoundingClientRect().width > 0)
  .map(e => [light(getComputedStyle(e)[e.tagName === 'text' ? 'fill' : 'color']), e.textContent])
  .map(([ink, text]) => [(Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05), text])
  .filter(([ratio]) => ratio < 4.5);"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    silos = ihdp_silos()
    document = run(IHDP, silos, release=tuple(silos), observe=True).document
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(document), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_renders(page: Page, report: Path, width: int, dark: bool) -> None:
    page.open(report.as_uri(), width=width, dark=dark)
    assert page.complaints() == []
    assert not page.overflows()
    assert page.text("h1").startswith("Difference of means")
    figures = page.ask(SEEN)
    assert isinstance(figures, list)
    assert [figure["key"] for figure in figures] == list(FIGURES)  # each once: wide or narrow
    for figure in figures:
        assert figure["role"] == "img"
        assert figure["title"]
        assert figure["said"]
        if figure["key"] == "participants-flow":
            assert figure["marks"] == 3  # a box of all records, and one for each of two arms
        else:
            assert figure["marks"] > 3
        assert figure["font"] > 9  # pixels: it can be read at this width
        assert figure["out"] == 0  # no label is cut off
    assert page.ask(CONTRAST) == []  # WCAG AA: 4.5 to 1


def test_the_keyboard_reaches_what_scrolls(page: Page, report: Path) -> None:
    page.open(report.as_uri(), width=360)
    regions = "return [...document.querySelectorAll('.scroll')]"
    assert page.ask(f"{regions}.length > 5")
    assert page.ask(f"{regions}.every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")
    links = "return [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))"
    assert page.ask(links)


def test_tables_of_many_columns_reflow_on_a_telephone(page: Page, report: Path) -> None:
    page.open(report.as_uri(), width=360)
    many = "[...document.querySelectorAll('table.many')].filter(t => t.getBoundingClientRect().width > 0)"
    assert page.ask(f"return {many}.length > 3")
    assert (
        page.ask(
            f"return {many}.filter(t => t.parentElement.scrollWidth > t.parentElement.clientWidth).length"
        )
        == 0
    )
    shown = f"getComputedStyle({many}[0].querySelector('td'), '::before').content"
    assert page.ask(f"return {shown}") == '"estimate"'
    page.open(report.as_uri(), width=1440)
    assert page.ask(f"return {shown}") == "none"


ACCESSIBLE = """
const all = selector => [...document.querySelectorAll(selector)];
const levels = all('h1,h2,h3,h4').map(h => +h.tagName[1]);
const ids = all('[id]').map(e => e.id);
const known = new Set(ids);
const named = e => (e.getAttribute('aria-labelledby') || '').split(' ').every(id => known.has(id));
return {
  'one h1': levels.filter(l => l === 1).length === 1,
  'headings skip no level': levels.every((l, k) => k === 0 || l <= levels[k - 1] + 1),
  'identifiers are unique': known.size === ids.length,
  'every column header has its scope': all('thead th').every(h => h.scope === 'col'),
  'every row header has its scope': all('tbody th').every(h => h.scope === 'row'),
  'every table is a named region': all('table').every(t => t.closest('[role=region][aria-label]')),
  'every figure has a caption': all('figure').every(f => f.querySelector('figcaption').textContent.trim()),
  'every drawing has a name and a description':
    all('figure svg').every(s => named(s) && s.querySelector('desc')),
  'landmarks': ['header', 'nav', 'main', 'footer'].every(tag => all(tag).length === 1),
  'links lead somewhere':
    all('a').every(a => a.textContent.trim() && (!a.hash || known.has(a.hash.slice(1)))),
  'the language is declared': document.documentElement.lang === 'en',
};"""


def test_the_report_is_accessible(page: Page, report: Path) -> None:
    page.open(report.as_uri(), width=1440)
    checks = page.ask(ACCESSIBLE)
    assert isinstance(checks, dict)
    assert len(checks) == 11
    assert [name for name, holds in checks.items() if not holds] == []


def test_the_report_prints(page: Page, report: Path) -> None:
    """On A4, dark mode or not: black on white, without the navigation."""
    page.open(report.as_uri(), width=1440, dark=True)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.ask("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.ask("return getComputedStyle(document.querySelector('nav')).display") == "none"
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 14


def test_what_a_user_wrote_is_shown_and_not_run(page: Page, tmp_path: Path) -> None:
    """A silo called like a script, in every place where its name is shown."""
    name = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
    hospitals = ihdp_silos()
    silos = {name if hospital == "hospital 1" else hospital: own for hospital, own in hospitals.items()}
    path = tmp_path / "report.html"
    path.write_text(render(run(IHDP, silos, release=tuple(silos)).document), encoding="utf-8")
    page.open(path.as_uri(), width=768)
    assert page.complaints() == []
    assert page.ask("return document.querySelectorAll('script, img').length") == 0
    assert name in page.text("main")
