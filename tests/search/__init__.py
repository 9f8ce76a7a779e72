"""The search for silence: generated training steps, split by memkit, judged by the whole batch in float64."""
