"""Building blocks of config sections: typed fields, targets, and one problem in a sentence."""
