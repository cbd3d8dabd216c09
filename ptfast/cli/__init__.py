"""The commands, one file each; heavy imports wait until a command needs them."""
