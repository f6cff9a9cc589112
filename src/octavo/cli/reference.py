"""`python -m octavo.cli.reference docs/settings.md` writes the reference page of all settings."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.cli.main import COMMANDS, command_parser
from octavo.settings_docs import render_settings


def page() -> str:
    """The Markdown of the page, from the commands as they are now."""
    return render_settings(command_parser(name) for name in COMMANDS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m octavo.cli.reference docs/settings.md")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
