"""One rule for every test here: without a GPU that torch can use it is skipped, and says so."""

import warnings

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that is too old for it
        found = torch.cuda.is_available()
    if not found:
        pytest.skip("needs an NVIDIA GPU and its driver: torch sees none")
