"""What a run says about itself: metrics, their files and writers, and a record of its starts."""
