"""Fixtures shared by the tests."""

import pytest

from zsim.ops import Key


@pytest.fixture
def key():
    """Makes keys that differ only in what happens."""

    def make(what="x", phase="forward", layer=0):
        return Key(0, 0, phase, layer, what)

    return make
