"""What a device holds: watched, counted, given back."""
