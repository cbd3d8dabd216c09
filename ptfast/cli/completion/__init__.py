"""Shell completion: the scripts for each shell, and the words that they request."""
