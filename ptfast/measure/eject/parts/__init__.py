"""What ejected scripts are cut from: whole programs in plain PyTorch, whose capitals the config decides."""
