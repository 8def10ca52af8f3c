"""The whole flow against a real vLLM; run by `make vllm` only."""
