"""What sections of a config are made of: typed fields, targets, and one problem in a sentence."""
