"""What people come for, one family a file."""
