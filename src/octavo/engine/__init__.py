"""The loop around a model: steps, sampling, text, offline `LLM`, and the process that a server talks to."""

import os

# OpenMP threads that wait spin for milliseconds by default; beside any other busy process (a server's client, say) they
# hold up the thread that has work. Set before torch is imported, which reads it once; the user's own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
