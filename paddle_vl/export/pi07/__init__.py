"""The policy and the planner as static programs, and the runtime of an exported folder."""
