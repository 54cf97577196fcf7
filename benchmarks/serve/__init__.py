"""Many requests at once: latency and throughput over request rates, beside transformers' own batching."""
