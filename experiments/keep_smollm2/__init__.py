"""What a real chat model forgets while it learns German novels, without any of its old text."""
