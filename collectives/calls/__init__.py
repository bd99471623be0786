"""All ranks make the same call: its declaration and its start, the first call, agreement, recovery, the debug mode."""
