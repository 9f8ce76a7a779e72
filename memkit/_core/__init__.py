"""What everything stands on: errors, units, settings, and records that packages share."""
