"""The loop over everything below: compress, serve, load, evaluate, and say what to do."""
