"""Fixtures shared by the tests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import Ranks

from zsim import cli
from zsim.ops import Key


@pytest.fixture
def key():
    """Makes keys that differ only in what happens."""

    def make(what="x", phase="forward", layer=0):
        return Key(0, 0, phase, layer, what)

    return make


@pytest.fixture
def zsim_main(capsys):
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def threads():
    """Quick for small grids, and it sees what a test replaces."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def one_thread():
    """torch computes as it does in a rank on a CPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks():
    """Runs a function in several processes joined by torch.distributed: `ranks(size, function, *arguments)`."""
    pytest.importorskip("torch", reason="torch is not installed")
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def own_ranks():
    """Processes of one test alone, which may kill them."""
    pytest.importorskip("torch", reason="torch is not installed")
    started = Ranks()
    yield started
    started.close()
