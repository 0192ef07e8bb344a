"""These tests run vLLM itself, in its own environment: `make test-vllm`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
