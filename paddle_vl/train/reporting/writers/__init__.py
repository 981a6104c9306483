"""Where a run's numbers go beside metrics.jsonl; a module is a writer, by its name in report_to."""
