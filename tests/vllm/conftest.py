"""These tests run vLLM itself, in its own environment: `make test-vllm`."""

import gc
import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(autouse=True)
def freed():
    """Policies, optimizer states and caches of a test go with it: together they are more than a small machine has."""
    yield
    gc.collect()
