"""A process keeps the timer slack that it was started with, and its threads may choose their own."""

from tests.interpreter import python
from weft.conf.host.processes import set_timer_slack

TOLD = """
import ctypes, threading
from weft.conf.host.processes import USUAL_S, set_timer_slack
slack = lambda: print(ctypes.CDLL(None).prctl(30), flush=True)
def punctual():
    set_timer_slack(USUAL_S)
    slack()
slack()
for each in (slack, punctual, slack):
    thread = threading.Thread(target=each)
    thread.start()
    thread.join()
"""


def test_slack_is_inherited_and_can_be_taken_back():
    ran = python("-c", TOLD, preexec_fn=lambda: set_timer_slack(0.05), timeout_s=60)
    assert ran.stdout.split() == ["50000000", "50000000", "50000", "50000000"]
