"""State to resume: saved whole, read without running anything, put back bitwise."""
