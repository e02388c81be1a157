"""When a process that a test waits for counts as hung."""

# Only to end what would never end: a slow or busy machine takes a multiple of what any other one took.
HANGS = 900.0
