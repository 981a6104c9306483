"""Reports: the curves and settings of one or several runs on one page, from their folders alone."""
