"""Fixtures of the tests of the transport."""

from contextlib import ExitStack

import pytest


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack
