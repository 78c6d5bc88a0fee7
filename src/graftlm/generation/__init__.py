"""Use of trained models: generation, prediction, inspection, evaluation, and traces of grafts."""
