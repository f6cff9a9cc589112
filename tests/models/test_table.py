"""docs/models.md says what the registry has."""

from __future__ import annotations

from pathlib import Path

from test_refusals import REFUSED as REFUSED_HERE

from octavo.models.registry import NATIVE
from octavo.models.table import FAMILIES, REFUSED, page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m octavo.models.table docs/models.md"


def test_every_native_architecture_has_a_name() -> None:
    assert FAMILIES.keys() == NATIVE.keys()


def test_what_the_page_calls_refused_is_tested_to_be() -> None:
    listed = {name for names in REFUSED for name in names.split(", ")}
    assert listed <= REFUSED_HERE.keys()
