"""Whether intervals of new targets cover what they promise."""
