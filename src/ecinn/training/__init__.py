"""The training loop, its two stages, distillation and evaluation."""
