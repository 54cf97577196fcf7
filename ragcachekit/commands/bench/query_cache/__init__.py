"""``bench query-cache``: hit rates, latency and recall over the workload of the Proximity paper."""
