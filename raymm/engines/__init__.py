"""Where tiles are multiplied: this process, or Ray workers."""
