"""What is outside the default run: vLLM wants an environment of its own, see tests/run_vllm."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm.py"]
