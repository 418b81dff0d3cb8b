"""What a process may no longer do."""
