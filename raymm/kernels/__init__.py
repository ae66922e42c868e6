"""What multiplies: exact or floating, on the processor."""
