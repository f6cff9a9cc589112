"""The tests of this folder share the scheduler machine, which is also a program of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
