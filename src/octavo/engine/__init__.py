"""The loop around a model: steps, sampling, text, offline `LLM`, and the process that a server talks to."""
