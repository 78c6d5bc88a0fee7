"""An experiment of two runs for the tests of `experiments.kit`."""
