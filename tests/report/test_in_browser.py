"""The page in a browser, where one is installed: widths, themes, print, keyboard, script and policy."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from linnet.report.html import write_report
from linnet.report.records import Content, HeldOutSet, TrainingSet
from tests.report.browser import Browser, browsing, chromium
from tests.report.material import digits_run, regression_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium() is None, reason="needs the program chromium"),
]
BAD = '"><script>document.title="run"</script><img src=x onerror=\'document.title="run"\'>'
WIDE = "W" * 90  # a name without a place to break

# What sticks out of the window, but for the insides of figures and what is hidden on purpose.
CUT = """[...document.querySelectorAll('body *')].filter(e => {
  const r = e.getBoundingClientRect();
  return r.width && (r.right > innerWidth + 1 || r.left < -1) && !e.closest('svg, thead, .status, .scroll');
}).map(e => e.outerHTML.slice(0, 90))"""
# Text that is wider than its box.
CLIPPED = """[...document.querySelectorAll('body *')].filter(e =>
  e.scrollWidth > e.clientWidth + 1 && e.clientWidth && getComputedStyle(e).overflowX != 'visible'
  && !e.closest('thead, .status, .scroll')).map(e => e.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    """One browser for all."""
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of several runs."""
    folder = tmp_path_factory.mktemp("pages")
    for name, run in (("digits", digits_run()), ("numbers", regression_run()), ("hostile", hostile_run())):
        write_report(folder / f"{name}.html", run)
    return folder


def hostile_run() -> Content:
    """The digits, with names that are markup, long, or a formula."""
    run = digits_run()
    assert run.train is not None
    assert run.test is not None
    count = len(run.test.samples)
    ids = [f"=1+{i}{BAD}{WIDE}" for i in range(len(run.train.samples))]
    train: TrainingSet = replace(run.train, samples=replace(run.train.samples, ids=tuple(ids)))
    test: HeldOutSet = replace(
        run.test, samples=replace(run.test.samples, ids=tuple(f"@{i},{BAD}" for i in range(count)))
    )
    return replace(run, title=BAD, classes=(BAD, WIDE, "=a", "eight", "nine"), train=train, test=test)


@pytest.mark.parametrize("name", ["digits", "numbers", "hostile"])
def test_nothing_is_cut_asked_for_or_complained_about(tab: Browser, pages: Path, name: str) -> None:
    looks = ((390, "light", "screen"), (820, "dark", "screen"), (1400, "light", "print"))
    for width, scheme, medium in looks:
        tab.show(width, scheme=scheme, medium=medium)
        tab.open(pages / f"{name}.html")
        tab.run("document.querySelectorAll('details').forEach(part => part.open = true)")
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run(CUT) == []
        assert tab.run(CLIPPED) == []
        assert tab.complaints() == []
        assert tab.requests() == [(pages / f"{name}.html").resolve().as_uri()]
    if name == "hostile":
        assert tab.run("document.title") == BAD


def test_the_policy_stops_other_scripts_and_requests(tab: Browser, pages: Path) -> None:
    tab.show(820)
    tab.open(pages / "digits.html")
    tab.run("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
    assert "Content Security Policy" in " ".join(tab.complaints())
    for attack in (
        "document.body.innerHTML = '<img>'",
        "document.body.setAttribute('onclick', 'document.title = 1')",
        "document.createElement('script').textContent = 'document.title = 1'",
    ):
        assert tab.run(f"(() => {{ try {{ {attack}; return false }} catch {{ return true }} }})()")
    assert tab.requests() == [(pages / "digits.html").resolve().as_uri()]


def test_themes_and_print(tab: Browser, pages: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    found = []
    for scheme, medium in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        tab.show(820, scheme=scheme, medium=medium)
        tab.open(pages / "digits.html")
        found.append(tab.run(paper))
    light, dark, printed = found
    assert light == "rgb(253, 252, 250)"
    assert dark == "rgb(23, 25, 29)"
    assert printed == "rgb(255, 255, 255)"
    assert tab.run("[...document.querySelectorAll('.save, .command button')].every(b => !b.offsetWidth)")


def test_without_its_script_the_page_is_whole(tab: Browser, pages: Path) -> None:
    tab.show(820)
    tab.open(pages / "digits.html", script=False)
    assert tab.run("document.querySelectorAll('button, input, dialog').length") == 0
    assert tab.run("[...document.querySelectorAll('.command')].every(part => part.offsetHeight > 20)")
    command = tab.run("document.querySelector('.command').textContent")
    assert command.startswith("linnet forget --run runs/digits --ids train/")
    with_script = "document.querySelectorAll('button').length"
    tab.open(pages / "digits.html")
    assert tab.run(with_script) > 40


def test_tables_sort_filter_and_export(tab: Browser, pages: Path) -> None:
    tab.show(1400)
    tab.open(pages / "hostile.html")
    tab.run("""window.table = document.querySelector('table[data-name=predictions]');
      table.closest('details').open = true;
      window.column = at => [...table.tBodies[0].rows].filter(r => !r.hidden)
        .map(r => r.cells[at].textContent);
      window.numbers = () => [...table.tBodies[0].rows].map(r => Number(r.cells[3].dataset.value)); 0""")
    press = "[...table.tHead.querySelectorAll('button')].find(b => b.textContent == 'Probability').click()"
    rising = tab.run("numbers()")
    assert rising == sorted(rising)
    tab.run(press)
    assert tab.run("numbers()") == sorted(rising, reverse=True)
    tab.run(press)
    assert tab.run("numbers()") == rising
    assert tab.run("table.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
    tab.run("""window.input = table.previousElementSibling.querySelector('input');
      input.value = 'WRONG eight'; input.dispatchEvent(new Event('input')); 0""")
    shown = tab.run("column(5)")
    assert 0 < len(shown) < len(rising)
    assert set(shown) == {"wrong"}
    text = tab.run("""new Promise(done => { const make = URL.createObjectURL;
      URL.createObjectURL = blob => { blob.text().then(done); return make(blob); };
      table.nextElementSibling.click(); })""")
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))
    assert len(rows) == len(shown)
    assert set(rows[0]) == {"Sample", "Predicted", "Probability", "True", "Verdict"}
    assert all(row["Sample"].startswith("'@") for row in rows)  # no formula
    assert all(0 < float(row["Probability"]) < 1 for row in rows)


def test_the_keyboard_enlarges_a_picture_and_closes_it(tab: Browser, pages: Path) -> None:
    tab.show(820)
    tab.open(pages / "digits.html")
    tab.run("document.querySelector('.enlarge').focus()")
    tab.press("Enter", 13)
    assert tab.run("document.querySelector('dialog').open")
    assert tab.run("document.querySelector('dialog img').getBoundingClientRect().width") > 400
    assert "training sample" in tab.run("document.querySelector('dialog p').textContent")
    tab.press("Escape", 27)
    assert not tab.run("document.querySelector('dialog').open")
    assert tab.run("document.activeElement.className") == "enlarge"


def test_tab_reaches_every_control_in_view(tab: Browser, pages: Path) -> None:
    tab.show(820)
    tab.open(pages / "digits.html")
    tab.run("""window.all = [...document.querySelectorAll('a, button, input, summary')]
      .filter(e => e.checkVisibility()); document.body.focus(); 0""")
    reached = []
    for _ in range(tab.run("all.length")):
        tab.press("Tab", 9)
        reached.append(tab.run("all.indexOf(document.activeElement)"))
    assert sorted(reached) == list(range(len(reached)))
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_commands_are_copied(tab: Browser, pages: Path) -> None:
    tab.show(820)
    tab.open(pages / "digits.html")
    tab.run("""(() => { navigator.clipboard.writeText = async text => { window.copied = text };
      document.querySelector('.command button').click() })()""")
    assert tab.run("copied").startswith("linnet forget --run runs/digits --ids train/")
    assert tab.run("copied") == tab.run("document.querySelector('.command code').textContent")


@pytest.mark.skipif("LINNET_AXE" not in os.environ, reason="LINNET_AXE names no axe.min.js of axe-core")
@pytest.mark.parametrize("name", ["digits", "numbers", "hostile"])
def test_axe_finds_nothing(tab: Browser, pages: Path, name: str) -> None:
    for width, scheme in ((390, "light"), (1400, "dark")):
        tab.show(width, scheme=scheme)
        tab.open(pages / f"{name}.html")
        tab.run("document.querySelectorAll('details').forEach(part => part.open = true)")
        tab.run(Path(os.environ["LINNET_AXE"]).read_text(encoding="utf-8") + ";0")
        assert tab.run("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))") == []
