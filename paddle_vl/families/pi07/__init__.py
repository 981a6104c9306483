"""pi07: everything particular to the robot policy and its planner."""
