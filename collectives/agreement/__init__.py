"""Handling of ranks that disagree, do not respond or die."""
