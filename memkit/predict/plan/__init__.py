"""The planner: what a step costs, how it may be arranged, and which arrangement that fits is the fastest."""
