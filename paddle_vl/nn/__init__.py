"""Building blocks of one device: norms, rotary, attention, linears, losses. They know no rank."""
