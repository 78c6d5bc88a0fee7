"""Files: digests, atomic writes, reading, and folders and hub repositories of models."""
