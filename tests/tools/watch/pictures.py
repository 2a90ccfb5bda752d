"""Pictures of the page's views for docs/watch.md: ``python -m tests.tools.watch.pictures``."""

import io
import json
import time
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.tools.watch.browser import Browser
from tests.tools.watch.recorded import Recording
from tests.tools.watch.test_page import served, show
from weft.pipeline.costs import LinkCost
from weft.tools.watch import FOLDER

IMAGES = Path(__file__).parents[3] / "docs" / "images"
VIEWS = {
    "overview": "overview",
    "heat": "heat?rank=5",
    "timeline": "timeline?step=40&rank=4&slot=2B1",
    "parallel": "ranks?rank=5",
    "links": "links?step=40",
    "time": "time?step=40&against=20",
}
SLOTS = ("0RECV_B3", "0B4", "1RECV_B3", "1B4", "2RECV_B3", "2F7", "3B3", "3RECV_F7")
"""The slots of the ranks. The last one of pipeline 1 waits for rank 5."""
SITES = {"east": range(4), "west": range(4, 8)}
COLOURS = 128


def recorded(folder: Path) -> Path:
    """Return the folder of a run over two sites, whose rank 5 becomes slower."""
    wan = LinkCost(latency_s=0.004, bandwidth_bps=2e9)
    run = Recording(folder, sites={"east": 2, "west": 2}, wan=wan, name="llama-8b-two-replicas")
    run.run(30)
    run.run(20, slow={5: 1.1})
    run.prefill(40, share=0.7)
    run.write({site: (ranks, 0.0) for site, ranks in SITES.items()})
    counters = {"ready": 8, "queued_bytes": 96 << 10, "retransmissions": 41, "resent_chunks": 0, "broken": 0}
    for site, ranks in SITES.items():
        now = [{"rank": rank, "slot": SLOTS[rank], "step": 50, "since": time.time() - 0.2} for rank in ranks]
        for each in now:
            each |= {"alive": True, "event_s": 1.5e-6}
            if each["rank"] in range(2, 6):
                sent = {"peer": {2: 4, 3: 5, 4: 2, 5: 3}[each["rank"]], "sent_bytes": 850 << 20, "busy_s": 3.7}
                each["links"] = [counters | sent | {"rtt_s": 0.0081}]
        text = json.dumps({"at": time.time(), "host": site, "ranks": now})
        (folder / FOLDER / f"now-{site}.json").write_text(text)
    return folder


def main() -> None:
    """Write a picture of each view, as high as its content."""
    with TemporaryDirectory() as folder:
        run = recorded(Path(folder) / "run")
        with served(run) as address, Browser(Path(folder) / "profile") as browser:
            for name, view in VIEWS.items():
                show(browser, address, view)
                if name == "overview":
                    browser.wait("document.querySelectorAll('#limits li').length > 1", 200)  # simulated
                browser.resize(1280, browser.run("document.getElementById('main').getBoundingClientRect().bottom | 0"))
                shot = b64decode(browser.call("Page.captureScreenshot")["data"])
                picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS)
                picture.save(IMAGES / f"watch_{name}.png", optimize=True)
            assert not browser.errors


if __name__ == "__main__":
    main()
