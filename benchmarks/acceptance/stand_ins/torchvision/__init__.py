"""Stand-in for torchvision in the acceptance kit: the names that the scripts use, over scikit-learn's digits."""
