"""Report of one or several runs on one HTML page, from their output folders alone."""
