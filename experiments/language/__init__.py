"""Studies of language models: facts that are learned and forgotten."""
