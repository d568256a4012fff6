"""The one place that asks the hardware."""
