"""Wrong labels: which ones leave-one-out finds."""
