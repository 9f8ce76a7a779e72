"""The planner: what a step costs, how it can be arranged, and which arrangement is the fastest that fits."""
