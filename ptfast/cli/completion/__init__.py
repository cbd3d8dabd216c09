"""Shell completion: the scripts of the shells, and the words that they ask for."""
