"""The search for the quickest settings of one recipe on one machine."""
