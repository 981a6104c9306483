"""Where the processes of a run meet: the store that their groups are made through."""
