"""Key-value arithmetic: composition of a model that memorises keys with a model that computes (see README.md)."""
