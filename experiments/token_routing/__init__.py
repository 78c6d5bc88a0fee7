"""LoRA experts of four domains, mixed token by token: Table 1 of the paper with small models trained from scratch."""
