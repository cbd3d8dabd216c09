"""Speed of light: operators counted, peaks measured, the distance between them."""
