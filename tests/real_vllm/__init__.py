"""A vLLM that computes on processors, in an environment of its own: `make test-vllm`. Elsewhere these are skipped."""
