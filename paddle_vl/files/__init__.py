"""Reading and writing files so that every fault is told by the file's name."""
