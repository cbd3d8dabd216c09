"""The commands, a file each; a heavy import waits until a command needs it."""
