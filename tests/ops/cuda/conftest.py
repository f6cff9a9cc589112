"""CUDA kernels run under an emulator on a CPU (`emulator.h`), and on the GPU itself where there is one."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
