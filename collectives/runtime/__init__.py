"""Communication: the link of a communicator, messages, groups of ranks, and the engine that runs operations."""
