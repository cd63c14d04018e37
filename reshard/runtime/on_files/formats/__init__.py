"""One module for each format: its metadata read into a `Checkpoint`, and the driver of its coded pieces."""
