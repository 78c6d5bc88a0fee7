"""What a model does after training: generate, predict, inspect, and the traces of its grafts."""
