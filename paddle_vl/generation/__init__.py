"""Text from next-token scores: settings, rules, sampling, streaming."""
