"""How far a run is from what its machine can do: operators counted, peaks measured, the next switch named."""
