"""What happens around generation: select and then write, ask and then answer. Each folder is a room."""
