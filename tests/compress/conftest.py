"""Makes the helpers importable, whichever directory the tests are started from, and a text to calibrate on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Some text to calibrate on."""
    path = tmp_path / "calibration.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and counts to 1234567890.\n" * 40, encoding="utf-8")
    return path
