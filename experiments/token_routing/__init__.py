"""LoRA experts of four domains, mixed token by token: Table 1 of the paper, at a size made from nothing."""
