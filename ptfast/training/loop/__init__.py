"""The hot loop: a step and its parts."""
