"""Who talks to whom, and which algorithm: pure functions of rank, size and figures."""
