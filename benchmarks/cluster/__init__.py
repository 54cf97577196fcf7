"""Several replicas, simulated."""
