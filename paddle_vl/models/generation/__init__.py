"""From logits to tokens: settings, the rules on logits, and sampling. Knows no model."""
