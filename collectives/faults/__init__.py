"""What happens when ranks do not agree, fall silent or die."""
