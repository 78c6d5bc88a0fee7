"""An English anchor and a French specialist: Tables 2 and 5, two specialists at once, and two tokenizers."""
