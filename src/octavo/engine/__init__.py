"""The engine: model, scheduler and cache put together; `LLM` and the server's engine process drive it."""

import os

# OpenMP threads that wait spin for milliseconds by default; with any other busy process on the machine (a server and its
# client, say) they then hold up the thread that has work. Set before torch, which reads it once; the user's own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
