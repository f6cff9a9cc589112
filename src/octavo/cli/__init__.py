"""The `octavo` command: one file a command, no logic of its own."""
