"""Makes the harness importable, whichever directory the tests are started from; one thread for models this small."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other at every tiny product cost most of the time, on a busy machine above all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
