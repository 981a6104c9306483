"""Images and video frames to patches."""
