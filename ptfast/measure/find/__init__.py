"""`ptfast find`: the learning rate, the batch size and the loader that suit a config here."""
