"""Checks of a composed config: names, types, rules across keys, trust."""
