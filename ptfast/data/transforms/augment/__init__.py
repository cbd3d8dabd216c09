"""Random changes to uint8 images, a whole batch at once, each image with draws of its own."""
