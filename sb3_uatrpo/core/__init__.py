"""The algorithm as functions of tensors: it knows neither Stable-Baselines3 nor an environment."""
