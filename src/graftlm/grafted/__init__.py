"""`GraftedModel`, a backbone with its grafts attached, and the sets of grafts that a server mixes in one batch."""
