"""Makes the harness importable, whichever directory the tests are started from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
