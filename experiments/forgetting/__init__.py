"""What forgetting leaves behind."""
