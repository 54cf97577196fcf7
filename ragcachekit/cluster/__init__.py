"""Several processes and machines, by Ray."""
