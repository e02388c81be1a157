"""Active learning: which criterion chooses labels that help."""
