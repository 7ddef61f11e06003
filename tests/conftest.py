"""Shared by all tests: devices, and the visible skip of tests that need CUDA.

It also makes `import reference` work: pytest puts the folder of this file on the path.
"""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is a backend for; the CUDA case is skipped where there is none."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
