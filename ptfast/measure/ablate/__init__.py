"""`ptfast ablate`: what each technique is worth here."""
