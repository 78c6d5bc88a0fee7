"""The forgetting of a real chat model that learns German novels without any of its old text."""
