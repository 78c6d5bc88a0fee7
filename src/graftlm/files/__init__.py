"""Files: digests, atomic writes, reading, and the folders and hub repositories that hold models."""
