"""Runs: what train, compare, demo and every experiment execute."""
