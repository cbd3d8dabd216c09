"""What in a model, its data, its loop and its machine costs speed, and what mends it."""
