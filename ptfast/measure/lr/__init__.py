"""The learning rate: a range test and short trials."""
