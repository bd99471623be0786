"""What a rank knows of the faults of other ranks, and how an error reaches all ranks. Imports no floor above."""
