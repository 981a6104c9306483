"""STAND-IN for PaddleFleet, see tests/support/paddlefleet_standin."""

IS_STAND_IN = True
