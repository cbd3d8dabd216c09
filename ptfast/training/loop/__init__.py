"""The hot loop: the training step and its parts."""
