"""Loss values with weights, and functions that compute their own gradients."""
