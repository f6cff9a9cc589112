"""Loads an OpenAI-compatible server over HTTP and says what its users would have felt.

Nothing here imports the engine or torch: any server can be measured, and a measuring process stays light.
"""
