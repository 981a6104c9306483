"""The pi07 family: robot policy and planner."""
