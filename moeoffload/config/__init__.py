"""Every setting once: one model per program, checked at the edge."""
