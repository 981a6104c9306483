"""Reading and writing files with errors that name the file."""
