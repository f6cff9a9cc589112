"""What a start says of its phases, and what it leaves of Python's own state."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo import ops
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.start import Phases, collector_at_rest


def test_phases_add_up_and_are_told_also_after_an_error() -> None:
    phases = Phases()
    before = []
    for _ in range(2):
        with phases("one"):
            before.append(phases.seconds["one"])
    with pytest.raises(KeyError), phases("two"):
        raise KeyError
    assert list(phases.seconds) == ["one", "two"] and phases.seconds["one"] > before[1] > before[0] == 0
    assert str(phases) == "one 0.0 s, two 0.0 s"


def test_a_phase_inside_of_another_is_not_counted_twice() -> None:
    phases, begin = Phases(), time.perf_counter()
    with phases("outer"):
        with phases("inner"):
            time.sleep(0.02)
        with phases("inner"), phases("innermost"):
            pass
    whole = time.perf_counter() - begin
    assert list(phases.seconds) == ["outer", "inner", "innermost"] and phases.seconds["inner"] >= 0.02
    assert sum(phases.seconds.values()) <= whole and phases.seconds["outer"] <= whole - 0.02


def test_an_engine_tells_its_phases(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.engine.engine"):
        engine = Engine(EngineConfig(model=str(tiny_llama), dtype="float32"))
    assert {"weights", "libraries", "kernels"} <= set(engine.start_seconds)
    assert 0 < sum(engine.start_seconds.values()) <= engine.info.load_seconds
    assert any("ready after" in message and "weights" in message for message in caplog.messages)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_rests_during_a_start_and_is_then_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(KeyError), collector_at_rest():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            raise KeyError
        assert gc.isenabled() == is_enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_prepared_for_a_cpu() -> None:
    cpu = torch.device("cpu")
    ops.begin_ahead(cpu)
    assert not ops.import_attention(128, torch.bfloat16, cpu)
    assert not any(thread.name == "hash-compiler" for thread in threading.enumerate())


TRACER = """
import sys
import torch
from octavo.ops.triton.attention_flash import _without_tracer

disable = torch.compiler.disable

def twice(x):
    return 2 * x

try:
    with _without_tracer():
        assert torch.compiler.disable(twice) is twice and torch.compiler.disable(recursive=False)(twice) is twice
        raise KeyError
except KeyError:
    assert torch.compiler.disable is disable
print("torch._dynamo" in sys.modules)
torch.compiler.disable(twice)
print("torch._dynamo" in sys.modules)
"""


def test_a_library_is_imported_without_the_tracer_of_torch() -> None:
    """The last line is what importing it costs otherwise; where torch no longer does, `_without_tracer` can go."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", TRACER], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr
