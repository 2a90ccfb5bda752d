"""The page in a real browser: every view, by mouse and keyboard, on a recorded and on a live run."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.quickstart import TINY_QUICKSTART
from tests.tools.watch.browser import CHROMIUM, Browser
from tests.tools.watch.recorded import Recording
from tests.waiting import until
from weft.pipeline.costs import LinkCost
from weft.tools.watch.analysis import heat, links, where_time_goes
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]
VIEWS = ("overview", "heat", "timeline", "ranks", "links", "time")
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


@contextmanager
def served(folder):
    """Run ``weft watch``, and yield its address."""
    line = [sys.executable, "-m", "weft.tools.cli", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process.stdout.readline().strip().rpartition(" ")[2].rstrip("/")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recording = Recording(tmp_path_factory.mktemp("run"), name=HOSTILE, local=LinkCost(latency_s=0.0005))
    recording.run(25)
    recording.run(20, slow={5: 1.1})
    folder = recording.write()
    logs = folder / "supervisor" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_text(f"a line with {HOSTILE}\n")
    with served(folder) as address:
        yield RunRecord(folder), address


def show(browser, address, view):
    browser.open("about:blank", "true")
    browser.open(f"{address}/#{view}", f"document.body?.dataset.view === '{view.partition('?')[0]}'")


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)})?.textContent")


def seconds(shown):
    value, unit = shown.split()
    return float(value) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[unit]


def test_the_page_shows_the_numbers_of_the_files(run, browser):
    record, address = run
    last = record.metrics[-1]
    show(browser, address, "overview")
    assert text(browser, "#now-loss") == f"{last['loss']:.4f}"
    assert seconds(text(browser, "#now-step_seconds")) == pytest.approx(last["step_seconds"], rel=0.006)
    assert text(browser, "#state").startswith("ended, step 45 of 1000")
    browser.wait("document.querySelectorAll('#limits li').length > 0")

    show(browser, address, "time")
    shown = int(re.search(r"Step (\d+)", text(browser, "h2"))[1])
    expected = where_time_goes(record, record.spans(shown))["measured"]
    for name in ("compute", "bubbles", "data"):
        assert seconds(text(browser, f"#time-{name}")) == pytest.approx(expected[name], rel=0.006)

    show(browser, address, "heat")
    found = heat(record)
    assert text(browser, "#outliers li") == found["outliers"][0]["text"] and len(found["outliers"]) == 1
    browser.run("document.getElementById('heat').focus()")
    for _ in range(5):
        browser.press("ArrowDown")
    assert text(browser, "#cell").startswith(f"rank {found['ranks'][5]}, forward: ")
    assert seconds(re.search(r": (.*) a step", text(browser, "#cell"))[1]) == pytest.approx(
        found["mean_s"][5][0], rel=0.006
    )
    browser.press("Enter")
    browser.wait("location.hash.includes('rank=5')")
    show(browser, address, "heat?group=pipeline&rank=5")
    assert text(browser, "#cell").startswith("rank 5 of pipeline 1, forward: ")
    browser.run("document.getElementById('heat').focus()")
    browser.press("ArrowUp")
    assert text(browser, "#cell").startswith("rank 3 of pipeline 1, forward: ")

    show(browser, address, "links")
    hops = {f"{h['from']}-{h['to']}-{h['kind']}": h for h in links(record, record.spans(shown))}
    assert browser.run("document.querySelectorAll('tbody tr').length") == len(hops)
    browser.run("document.querySelector('tbody button').click()")
    browser.wait("document.getElementById('hop')")
    hop = hops[browser.run("new URLSearchParams(location.hash.split('?')[1]).get('hop')")]
    assert seconds(re.search(r"took (.*?);", text(browser, "#hop"))[1]) == pytest.approx(hop["fastest_s"], rel=0.006)
    assert browser.errors == []


def test_an_action_of_the_timeline_shows_its_dependencies_and_has_a_link(run, browser):
    record, address = run
    spans = record.spans(12)
    show(browser, address, "timeline?step=12&rank=2&slot=1F0")
    found = text(browser, "#action")
    span = spans[(spans.slot == "1F0") & (spans["rank"] == 2)].iloc[0]
    assert found.startswith("1F0 on rank 2: ") and "Needs 1RECV_F0 on rank 2" in found
    assert seconds(re.search(r"rank 2: (.*?) from", found)[1]) == pytest.approx(span.end_s - span.start_s, rel=0.006)
    browser.run("document.getElementById('timeline').focus()")
    browser.press("ArrowLeft")
    assert text(browser, "#action").startswith("1RECV_F0 on rank 2") and "0SEND_F0 on rank 0" in text(
        browser, "#action"
    )
    browser.press("ArrowDown")
    assert " on rank 3" in text(browser, "#action")
    # A click on the first forward of rank 0.
    box = browser.run(
        "(() => { const b = document.getElementById('timeline').getBoundingClientRect(); return [b.left, b.top]; })()"
    )
    point = {"x": box[0] + 72, "y": box[1] + 24, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, **point)
    browser.wait("location.hash.includes('slot=0F0')")
    browser.run("const i = document.getElementById('step'); i.value = 30; i.dispatchEvent(new Event('change'))")
    browser.wait("document.querySelector('h2').textContent.startsWith('Step 30')")
    assert browser.errors == []


def test_transfers_prefills_and_uplinks_have_lanes(tmp_path, browser):
    recording = Recording(tmp_path / "run", sites={"east": 2, HOSTILE: 2}, wan=LinkCost(latency_s=0.004))
    recording.run(3)
    recording.prefill(2, tokens=96)
    folder = recording.write({"a": (range(4), 0.0), "b": (range(4, 8), 2.0)})
    link = {"peer": 4, "ready": 8, "sent_bytes": 3 << 20, "queued_bytes": 5 << 10, "retransmissions": 7}
    link |= {"resent_chunks": 11, "broken": 2, "busy_s": 1.0, "rtt_s": 0.03}
    now = {"rank": 2, "slot": "", "step": 3, "since": 0.0, "alive": False, "links": [link]}
    (folder / "watch" / "now-a.json").write_text(json.dumps({"at": 0.0, "host": HOSTILE, "ranks": [now]}))
    shown = Views(RunRecord(folder)).show("timeline", step=2)

    def of(lane, rank):
        return sorted(
            (each for each in shown[lane] if each[0] == rank), key=lambda each: each[-3 if lane[0] == "t" else 3]
        )

    with served(folder) as address:
        show(browser, address, "timeline?step=2&rank=2&slot=1F0")
        assert "prefill" in text(browser, ".bar")
        bound = re.fullmatch(
            r"Clocks of 2 hosts are lined up .* to within (.*) of the first one's\. *", text(browser, "#clocks")
        )
        assert seconds(bound[1]) == pytest.approx(shown["clocks"]["bound_s"], rel=0.006)
        browser.run("document.getElementById('timeline').focus()")
        browser.press("ArrowDown", shift=True)
        nearest = re.match(
            r"(\S+) from rank 2 to rank (\d+)( over .*?)?: (at most )?(\S+ \S+) from", text(browser, "#action")
        )
        sent = [each for each in of("transfers", 2) if each[3] == nearest[1]]
        assert [each[1] for each in sent] == [int(nearest[2])]
        assert seconds(nearest[5]) == pytest.approx(sent[0][5] - sent[0][4], rel=0.006)
        assert bool(nearest[4]) != sent[0][6] and (nearest[3] or "").removeprefix(" over ") == sent[0][2]
        browser.press("ArrowDown", shift=True)
        for _ in range(50):  # to the first
            browser.press("ArrowLeft")
        first = of("prefills", 2)[0]
        found = re.fullmatch(r"prefill 96 tokens on rank 2: (.*?) from (.*?)\.", text(browser, "#action"))
        assert seconds(found[1]) == pytest.approx(first[4] - first[3], rel=0.006)
        assert seconds(found[2]) == pytest.approx(first[3], rel=0.006)
        # The same by the mouse, and in the tooltip: below the slots and the transfers of the second stage's first rank.
        middle = (first[3] + first[4]) / 2 / max(shown["step_s"], shown["predicted_step_s"])
        x, y = browser.run(
            "(() => { const b = document.getElementById('timeline').getBoundingClientRect();"
            f" return [b.left + 64 + (b.width - 64) * {middle},"
            " b.top + 18 + 2 * (2 * 21 + 6 + 12) + 24]; })()"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.wait("document.getElementById('timeline').title.startsWith('prefill 96 tokens on rank 2')")
        for _ in range(20):
            browser.press("ArrowDown")
        over = re.search(r"over (.*?): ", text(browser, "#action"))[1]
        assert over == sorted({each[2] for each in shown["transfers"]})[-1]
        show(browser, address, "links")
        row = "[...document.getElementById('link-2-4').closest('tr').children].map((cell) => cell.textContent)"
        assert browser.run(row) == [
            *("2 → 4", f"east → {HOSTILE}", "8", "3 MiB", "25.17", "–", "30.0 ms", "5 KiB", "7", "11", "2")
        ]
        for width in (1280, 390):
            browser.resize(width)
            show(browser, address, "timeline?step=2")
            assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.errors == [] and text(browser, "#name") == "recorded"


def test_a_rank_shows_its_peers(run, browser):
    record, address = run
    show(browser, address, "ranks")
    assert browser.run("document.querySelectorAll('.rank').length") == len(record.places)
    browser.run("document.getElementById('rank-5').click()")
    browser.wait("document.querySelectorAll('.rank.peer').length === 4")
    assert "rank=5" in browser.run("location.hash")
    assert "Same pipeline1, 3, 7" in browser.run("document.querySelector('dl').textContent")
    assert browser.errors == []


def test_nothing_in_a_run_becomes_markup(run, browser):
    _, address = run
    for view in VIEWS:
        show(browser, address, view)
        assert text(browser, "#name") == HOSTILE
        assert browser.run("document.title").startswith("<img src=x")
        assert browser.run("document.querySelectorAll('img, script:not([src])').length") == 0
    show(browser, address, "overview")
    assert text(browser, "#log") == f"a line with {HOSTILE}"
    assert browser.errors == []


def test_the_page_is_usable_by_keyboard_and_on_a_phone(run, browser):
    _, address = run
    for width in (1280, 390):
        browser.resize(width)
        for view in VIEWS:
            show(browser, address, view)
            assert browser.run("document.documentElement.scrollWidth") <= width, (view, width)
    show(browser, address, "overview")
    reached = []
    for _ in range(3):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.hash"))
    assert reached == ["#overview", "#heat", "#timeline"]
    browser.press("Enter")
    browser.wait("document.body.dataset.view === 'timeline'")
    assert browser.errors == []


def test_a_live_run_of_eight_ranks_is_followed(tmp_path, browser):
    command = [sys.executable, "-m", "weft.tools.cli", "launch", *TINY_QUICKSTART, "cluster.ranks=8"]
    command += [f"train.output_dir={tmp_path}", "train.steps=100000", "pipeline.microbatches=4"]
    job = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    folder = tmp_path / "quickstart"
    try:
        until(lambda: list((folder / "watch").glob("steps-*.parquet")) or job.poll() is not None, 300.0)
        assert job.poll() is None
        with served(folder) as address:
            show(browser, address, "overview")
            browser.wait("document.getElementById('dot').classList.contains('live')")
            step = "Number(document.getElementById('state').textContent.match(/step (\\d+)/)[1])"
            before = browser.run(step)
            browser.wait(f"{step} > {before}", 60)
            for view in VIEWS:
                show(browser, address, view)
            assert browser.run("document.querySelectorAll('.rank').length") == 0
            show(browser, address, "ranks?rank=3")
            assert browser.run("document.querySelectorAll('.rank').length") == 8
            show(browser, address, "timeline")
            assert re.fullmatch(r"Timing took a rank at most [\d.]+ % of this step\.", text(browser, "#timer"))
            assert browser.errors == []
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(60)
