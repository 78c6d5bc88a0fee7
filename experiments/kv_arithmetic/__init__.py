"""Key-value arithmetic: one model knows keys, one computes, both compose (see README.md in this folder)."""
