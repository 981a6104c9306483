"""Building blocks of one device: norms, rotary, attention, linears, losses. No rank is known here."""
