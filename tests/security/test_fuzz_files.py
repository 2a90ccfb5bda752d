"""Damaged schedules and costs: each file is read, or is one `ValueError`, in bounded memory."""

import gc
import multiprocessing
import random
import re
import resource
from pathlib import Path

import pytest

from tests.security.damage import damaged
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.profile import costs_to_yaml, load_costs, load_pieces
from weft.pipeline.serialization import load_schedule, schedule_to_csv, schedule_to_json

FILES = 400
MOST_BYTES = 4 << 30  # of address space, in addition to the process's own
SCHEDULE = generate("1f1b", Placement.straight(4), 6)
COSTS = CostModel.unit(4)
KINDS = {
    "schedule.csv": (schedule_to_csv(SCHEDULE), load_schedule),
    "schedule.json": (schedule_to_json(SCHEDULE), load_schedule),
    "costs.yaml": (costs_to_yaml(COSTS), lambda path: load_costs(path, 4)),
    "pieces.yaml": (costs_to_yaml(COSTS), load_pieces),
}
NUMBERS = ["99999999999", "1e400", "1e-320", "-1", "0", "nan", ".inf", "NaN", "true", "null", "[]", "[[[[", "{}", "x"]


def spoilt(text, luck):
    """Some of its numbers are others, or its bytes are damaged."""
    numbers = list(re.finditer(r"\d+(\.\d+)?", text))
    if luck.random() < 0.5:
        for found in sorted(luck.sample(numbers, luck.randint(1, 3)), key=lambda found: -found.start()):
            text = text[: found.start()] + luck.choice(NUMBERS) + text[found.end() :]
        return text.encode()
    return damaged(text.encode(), luck)


def read_all(kind, folder, answers):
    """Return the errors of reading that were no `ValueError`, with the input."""
    gc.freeze()  # a process group among what earlier tests left would wait for threads that a fork lacks
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES,) * 2)
    text, read = KINDS[kind]
    luck = random.Random(kind)
    wrong, refused = [], 0
    for _ in range(FILES):
        path = folder / kind
        path.write_bytes(content := spoilt(text, luck))
        try:
            read(path)
        except ValueError:
            refused += 1
        except BaseException as error:
            wrong.append((repr(error)[:300], content[:2000]))
    answers.put((wrong[:3], refused))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_with_a_value_error(kind, tmp_path):
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    process = fork.Process(target=read_all, args=(kind, tmp_path, answers), daemon=True)
    process.start()
    process.join(100)
    ended = not process.is_alive()
    process.kill()
    assert ended, "a file keeps its reader busy"
    assert process.exitcode == 0
    wrong, refused = answers.get()
    assert not wrong
    assert refused > FILES / 4
