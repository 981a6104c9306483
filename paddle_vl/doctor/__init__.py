"""`paddle-vl doctor`: checks of an installation on the machine that it is to run on."""
