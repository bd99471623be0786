"""How ranks talk: the link of a communicator, messages, groups of ranks, and the engine that drives operations."""
