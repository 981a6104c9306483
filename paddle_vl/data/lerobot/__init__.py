"""Robot datasets as LeRobot writes them, versions 2.0, 2.1 and 3.0; see docs/robot_data.md."""
