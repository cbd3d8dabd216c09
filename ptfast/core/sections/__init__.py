"""Building blocks of config sections: typed fields, targets, and one-sentence errors."""
