"""A vLLM that computes on the CPU, in an environment of its own: `make test-vllm`. Elsewhere these are skipped."""
