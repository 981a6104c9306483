"""HTML report of one or several runs, from their output folders."""
