"""Kernels run natively where there is a GPU and under Triton's interpreter elsewhere (`tests/conftest.py`)."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules of this folder

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        """The interpreter keeps scalars as arrays of one element, which numpy 2.4 refuses as bounds of a range."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
