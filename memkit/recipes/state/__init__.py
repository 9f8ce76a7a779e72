"""State to resume from: saved atomically, read without running any code, restored bitwise."""
