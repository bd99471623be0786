"""Nothing: mpicomp draws on the host, so that all ranks and devices draw alike."""
