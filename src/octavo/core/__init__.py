"""Requests and their blocks: scheduler, block pool, prefix cache. Plain Python, so that a simulator can drive it."""
